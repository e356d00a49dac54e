# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Residency resolve: where each selected row is read from, with an exact LRU of hot rows, wholly on the
device.

Of each selected position of a request, in this order:
1. its page is resident: the row is read in place;
2. a hot slot holds it: a hit;
3. the host holds it: a miss; it takes the least recently used slot that no selected row needs;
4. neither: -1 (attention skips it), counted as missing.

Inputs (request slots index the persistent tables; rows of one batch entry are adjacent)
    selection        [batch * query_len, k]      int32 positions, -1 for none; unique within a row
    lengths          [batch]                     int32 context tokens; positions at or past it count as none
    request_slots    [batch]                     int32, -1 for a padding entry
    resident_blocks  [num_requests, max_pages]   int32 GPU block of the page in this group, < 0: none
    host_blocks      [num_requests, max_pages]   int32 host block, < 0: no complete host copy
    hot_blocks       [num_requests, hot_pages]   int32 GPU blocks leased as hot pages, < 0: no lease (a
                                                 request without its first page reads nothing from the host)
Outputs (every one written in every launch, padding entries too)
    rows             [batch * query_len, k]      int32 flat rows of the GPU pool, -1 for none
    extents          [batch * query_len]         int32, one past the last entry of the row that is not -1
    miss_host_rows   [batch * query_len * k]     int32 host rows to fetch (host block * page_rows + row)
    miss_hot_rows    [batch * query_len * k]     int32 flat rows of the GPU pool they go to
    num_misses       [1]                         int32, entries of the two lists in use
    stats            [batch, 4]                  int32 distinct positions: resident, hits, misses, missing

A flat row is `block * rows_per_block + row`; `rows_per_block` is the block's bytes over the row's. Layer l of
the group is reached by passing the pool from row `l * page_rows` on, so one plan serves the index leader and
every layer that follows it: nothing in a plan depends on the layer.

The union of a batch entry's query rows (the verification rows of speculative decoding) is one working set:
shared positions are fetched once, and no row evicts what another needs. That takes `hot_rows >= query_len *
k`. The order of slots becomes [untouched evictables, old order | fresh misses | hits, old order], as in the
public systems; misses are numbered by their first occurrence, query row by query row.

Membership needs no hash and no clearing: `first_entry[batch, position]` names the entry that selects the
position, and is believed only if that entry does. Three launches, so that kernel boundaries order memory:
`mark` (places, first entries), `walk` (hits and evictables, compacted by prefix sums), `place` (victims,
order, lists). Only inside one program, between query rows, does a block barrier order global memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels.aot_types import integer_types
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.hot_state import HotState, host_renew_kernel, hot_reset_kernel
from hisparsim_kernels.registry import AotCase
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch, check_resolve


@triton.jit
def resolve_mark_kernel(
    selection_ptr, lengths_ptr, request_slots_ptr, resident_blocks_ptr, host_blocks_ptr, hot_blocks_ptr,
    first_entry_ptr, wanted_ptr, entry_slots_ptr, counts_ptr, rows_ptr, extents_ptr, stats_ptr,
    max_pages, hot_pages, max_tokens, rows_per_block,
    K: tl.constexpr, QUERY_LEN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (batch): resident rows, host rows wanted, and the first entry that selects each position."""
    batch = tl.program_id(0).to(tl.int64)
    request = tl.load(request_slots_ptr + batch).to(tl.int64)
    tl.store(counts_ptr + batch * 2 + tl.arange(0, 2), 0)
    tl.store(stats_ptr + batch * 4 + tl.arange(0, 4), 0)
    length = tl.where(request >= 0, tl.load(lengths_ptr + batch), 0)
    length = tl.minimum(length, max_tokens)
    leased = tl.load(hot_blocks_ptr + request * hot_pages, mask=request >= 0, other=-1) >= 0
    # Last query row first: where rows share a position, the first row's entry is the one that stays.
    for step in range(QUERY_LEN):
        query = QUERY_LEN - 1 - step
        extent = 0
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < K
            entry = query * K + at
            position = tl.load(selection_ptr + batch * (QUERY_LEN * K) + entry, mask=inside, other=-1)
            valid = (position >= 0) & (position < length)
            page = tl.where(valid, position, 0) // PAGE
            row = tl.where(valid, position, 0) % PAGE
            block = tl.load(resident_blocks_ptr + request * max_pages + page, mask=valid, other=-1)
            on_host = valid & (block < 0)
            host = tl.load(host_blocks_ptr + request * max_pages + page, mask=on_host, other=-1)
            wants = on_host & (host >= 0) & leased
            out = batch * (QUERY_LEN * K) + entry
            tl.store(rows_ptr + out, tl.where(block >= 0, block * rows_per_block + row, -1), mask=inside)
            tl.store(wanted_ptr + out, tl.where(wants, host * PAGE + row, -1), mask=inside)
            tl.store(entry_slots_ptr + out, -1, mask=inside)
            tl.store(first_entry_ptr + batch * max_tokens + position, entry.to(tl.int16), mask=valid)
            extent = tl.maximum(extent, tl.max(tl.where((block >= 0) | wants, at + 1, 0)))
        tl.store(extents_ptr + batch * QUERY_LEN + query, extent)
        tl.debug_barrier()


@triton.jit
def resolve_walk_kernel(
    selection_ptr, lengths_ptr, request_slots_ptr, host_generations_ptr,
    positions_ptr, generations_ptr, lru_ptr,
    first_entry_ptr, wanted_ptr, entry_slots_ptr, evictable_ptr, hits_ptr, counts_ptr, rows_ptr, stats_ptr,
    max_tokens, hot_rows,
    K: tl.constexpr, QUERY_LEN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (batch): count the distinct rows wanted; split the slots, in LRU order, into hits and
    evictables."""
    batch = tl.program_id(0).to(tl.int64)
    request = tl.load(request_slots_ptr + batch).to(tl.int64)
    if request < 0:
        return
    entries = batch * (QUERY_LEN * K)
    length = tl.minimum(tl.load(lengths_ptr + batch), max_tokens)
    num_wanted = 0
    num_resident = 0
    num_missing = 0
    for start in range(0, QUERY_LEN * K, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < QUERY_LEN * K
        position = tl.load(selection_ptr + entries + entry, mask=inside, other=-1)
        valid = (position >= 0) & (position < length)
        first = tl.load(first_entry_ptr + batch * max_tokens + position, mask=valid, other=-1).to(tl.int32)
        first = valid & (first == entry)
        wants = tl.load(wanted_ptr + entries + entry, mask=first, other=-1) >= 0
        resident = tl.load(rows_ptr + entries + entry, mask=first, other=-1) >= 0
        num_wanted += tl.sum(wants.to(tl.int32))
        num_resident += tl.sum(resident.to(tl.int32))
        num_missing += tl.sum((first & (wants == 0) & (resident == 0)).to(tl.int32))
    tl.store(stats_ptr + batch * 4, num_resident)
    tl.store(stats_ptr + batch * 4 + 3, num_missing)
    if num_wanted == 0:
        return
    line = request * hot_rows
    num_hits = 0
    num_evictable = 0
    for start in range(0, hot_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < hot_rows
        slot = tl.load(lru_ptr + line + at, mask=inside, other=0).to(tl.int32)
        position = tl.load(positions_ptr + line + slot, mask=inside, other=-1)
        held = (position >= 0) & (position < max_tokens)
        entry = tl.load(first_entry_ptr + batch * max_tokens + position, mask=held, other=-1).to(tl.int32)
        # A stale first entry is harmless: it counts only if that entry selects this very position now.
        believed = (entry >= 0) & (entry < QUERY_LEN * K)
        believed = believed & (tl.load(selection_ptr + entries + entry, mask=believed, other=-1) == position)
        host_row = tl.load(wanted_ptr + entries + entry, mask=believed, other=-1)
        wants = host_row >= 0
        generation = tl.load(host_generations_ptr + host_row // PAGE, mask=wants, other=0)
        hit = wants & (tl.load(generations_ptr + line + slot, mask=wants, other=0) == generation)
        tl.store(entry_slots_ptr + entries + entry, slot.to(tl.int16), mask=hit)
        hit_rank = num_hits + tl.cumsum(hit.to(tl.int32), 0) - 1
        evicted = inside & (hit == 0)
        evict_rank = num_evictable + tl.cumsum(evicted.to(tl.int32), 0) - 1
        tl.store(hits_ptr + batch * hot_rows + hit_rank, slot.to(tl.int16), mask=hit)
        tl.store(evictable_ptr + batch * hot_rows + evict_rank, slot.to(tl.int16), mask=evicted)
        num_hits += tl.sum(hit.to(tl.int32))
        num_evictable += tl.sum(evicted.to(tl.int32))
    tl.store(counts_ptr + batch * 2, num_wanted)
    tl.store(counts_ptr + batch * 2 + 1, num_hits)
    tl.store(stats_ptr + batch * 4 + 1, num_hits)
    tl.store(stats_ptr + batch * 4 + 2, num_wanted - num_hits)


@triton.jit(do_not_specialize=["num_batch"])
def resolve_place_kernel(
    selection_ptr, request_slots_ptr, hot_blocks_ptr, host_generations_ptr, positions_ptr, generations_ptr,
    lru_ptr,
    first_entry_ptr, wanted_ptr, entry_slots_ptr, evictable_ptr, hits_ptr, counts_ptr,
    rows_ptr, miss_host_rows_ptr, miss_hot_rows_ptr, num_misses_ptr,
    num_batch, hot_pages, max_tokens, hot_rows, rows_per_block,
    K: tl.constexpr, QUERY_LEN: tl.constexpr, PAGE: tl.constexpr, BATCH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (batch): give misses the oldest evictables, write flat rows, the compact miss list and the new
    order."""
    batch = tl.program_id(0).to(tl.int64)
    others = tl.arange(0, BATCH_PADDED)
    wanted_of = tl.load(counts_ptr + others * 2, mask=others < num_batch, other=0)
    hits_of = tl.load(counts_ptr + others * 2 + 1, mask=others < num_batch, other=0)
    misses_of = wanted_of - hits_of
    if batch == 0:
        tl.store(num_misses_ptr, tl.sum(misses_of))
    request = tl.load(request_slots_ptr + batch).to(tl.int64)
    if request < 0:
        return
    num_wanted = tl.load(counts_ptr + batch * 2)
    if num_wanted == 0:
        return
    num_hits = tl.load(counts_ptr + batch * 2 + 1)
    num_misses = num_wanted - num_hits
    list_begin = tl.sum(tl.where(others < batch, misses_of, 0)).to(tl.int64)
    entries = batch * (QUERY_LEN * K)
    line = request * hot_rows
    placed = 0
    for start in range(0, QUERY_LEN * K, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        host_row = tl.load(wanted_ptr + entries + entry, mask=entry < QUERY_LEN * K, other=-1)
        wants = host_row >= 0
        position = tl.load(selection_ptr + entries + entry, mask=wants, other=0)
        first = tl.load(first_entry_ptr + batch * max_tokens + position, mask=wants, other=-1).to(tl.int32)
        wants = wants & (first == entry)
        slot = tl.load(entry_slots_ptr + entries + entry, mask=wants, other=-1).to(tl.int32)
        miss = wants & (slot < 0)
        rank = placed + tl.cumsum(miss.to(tl.int32), 0) - 1
        victim = tl.load(evictable_ptr + batch * hot_rows + rank, mask=miss, other=0).to(tl.int32)
        slot = tl.where(miss, victim, slot)
        generation = tl.load(host_generations_ptr + host_row // PAGE, mask=miss, other=0)
        tl.store(positions_ptr + line + slot, position, mask=miss)
        tl.store(generations_ptr + line + slot, generation, mask=miss)
        block = tl.load(hot_blocks_ptr + request * hot_pages + slot // PAGE, mask=wants, other=0)
        # A slot of a page that is not leased has no row: attention and gather skip it.
        flat = tl.where(block >= 0, block * rows_per_block + slot % PAGE, -1)
        tl.store(rows_ptr + entries + entry, flat, mask=wants)
        tl.store(miss_host_rows_ptr + list_begin + rank, host_row, mask=miss)
        tl.store(miss_hot_rows_ptr + list_begin + rank, flat, mask=miss)
        placed += tl.sum(miss.to(tl.int32))
    if QUERY_LEN > 1:
        tl.debug_barrier()  # flat rows of first entries, written above, are read below
        for start in range(K, QUERY_LEN * K, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            wants = tl.load(wanted_ptr + entries + entry, mask=entry < QUERY_LEN * K, other=-1) >= 0
            position = tl.load(selection_ptr + entries + entry, mask=wants, other=0)
            first = tl.load(first_entry_ptr + batch * max_tokens + position, mask=wants, other=0).to(tl.int32)
            again = wants & (first != entry)
            flat = tl.load(rows_ptr + entries + first, mask=again, other=-1)
            tl.store(rows_ptr + entries + entry, flat, mask=again)
    num_evictable = hot_rows - num_hits
    num_untouched = num_evictable - num_misses
    for start in range(0, hot_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_hit = (at >= num_evictable) & (at < hot_rows)
        source = tl.where(at < num_untouched, at + num_misses, at - num_untouched)
        old = tl.load(evictable_ptr + batch * hot_rows + source, mask=at < num_evictable, other=0)
        kept = tl.load(hits_ptr + batch * hot_rows + at - num_evictable, mask=is_hit, other=0)
        tl.store(lru_ptr + line + at, tl.where(is_hit, kept, old), mask=at < hot_rows)


def resolve_config(hot_rows: int, device: torch.device) -> tuple[LaunchConfig, LaunchConfig, LaunchConfig]:
    """Configurations of the three launches; depends on capacities only."""
    name = "small" if hot_rows <= 1024 else "default"
    arch = arch_of(device)
    mark, walk, place = (
        find_config("resolve", f"resolve_{part}", name, arch) for part in ("mark", "walk", "place")
    )
    return mark, walk, place


def resolve(
    selection: torch.Tensor,
    lengths: torch.Tensor,
    request_slots: torch.Tensor,
    tables: ResidencyTables,
    state: HotState,
    plan: ResolvePlan,
    scratch: ResolveScratch,
    *,
    query_len: int = 1,
    configs: tuple[LaunchConfig, LaunchConfig, LaunchConfig] | None = None,
) -> None:
    """Fill `plan` for the selection and update `state`: three launches, nothing allocated, nothing read back.

    A request appears once in a batch. Raises `DtypeError`, `ShapeError`, `StrideError`, `DeviceError` or
    `RangeError` (top-k of all query rows over the hot rows, slot ids past int16) before anything is launched.
    """
    check_resolve(selection, lengths, request_slots, tables, state, plan, scratch, query_len)
    mark, walk, place = configs or resolve_config(state.hot_rows, selection.device)
    batch = lengths.shape[0]
    if batch == 0:
        plan.num_misses.zero_()
        return
    max_pages, hot_pages = tables.resident_blocks.shape[1], tables.hot_blocks.shape[1]
    max_tokens = scratch.first_entry.shape[1]
    shape = {"K": selection.shape[1], "QUERY_LEN": query_len, "PAGE": tables.page_rows}
    resolve_mark_kernel[(batch,)](
        selection, lengths, request_slots, tables.resident_blocks, tables.host_blocks, tables.hot_blocks,
        scratch.first_entry, scratch.wanted, scratch.entry_slots, scratch.counts,
        plan.rows, plan.extents, plan.stats,
        max_pages, hot_pages, max_tokens, tables.rows_per_block, **shape, **mark.launch_arguments(),
    )  # fmt: skip
    resolve_walk_kernel[(batch,)](
        selection, lengths, request_slots, tables.host_generations, state.positions, state.generations,
        state.lru,
        scratch.first_entry, scratch.wanted, scratch.entry_slots, scratch.evictable, scratch.hits,
        scratch.counts,
        plan.rows, plan.stats, max_tokens, state.hot_rows, **shape, **walk.launch_arguments(),
    )  # fmt: skip
    resolve_place_kernel[(batch,)](
        selection, request_slots, tables.hot_blocks, tables.host_generations,
        state.positions, state.generations, state.lru,
        scratch.first_entry, scratch.wanted, scratch.entry_slots, scratch.evictable, scratch.hits,
        scratch.counts,
        plan.rows, plan.miss_host_rows, plan.miss_hot_rows, plan.num_misses,
        batch, hot_pages, max_tokens, state.hot_rows, tables.rows_per_block,
        **shape, BATCH_PADDED=triton.next_power_of_2(batch), **place.launch_arguments(),
    )  # fmt: skip


_AOT_TYPES = {f"{name}_ptr": "*i16" for name in ("lru", "first_entry", "entry_slots", "evictable", "hits")}


def _aot_cases() -> tuple[AotCase, ...]:
    kernels = {"mark": resolve_mark_kernel, "walk": resolve_walk_kernel, "place": resolve_place_kernel}
    cases: list[AotCase] = []
    for part, fn in kernels.items():
        for config, shape, k, query_len in (
            ("default", "decode", 2048, 1),
            ("default", "mtp3", 2048, 4),
            ("small", "tiny", 128, 1),
        ):
            constants = {"K": k, "QUERY_LEN": query_len, "PAGE": 64}
            if part == "place":
                constants["BATCH_PADDED"] = 256
            cases.append(
                AotCase(
                    f"resolve_{part}", config, fn, integer_types(fn, _AOT_TYPES), constants,
                    divisible_by_16=frozenset({"max_tokens", "hot_rows", "rows_per_block"}), shape=shape,
                )
            )  # fmt: skip
    reset = AotCase(
        "hot_reset",
        "default",
        hot_reset_kernel,
        integer_types(hot_reset_kernel, _AOT_TYPES),
        divisible_by_16=frozenset({"hot_rows"}),
    )
    renew = AotCase("host_renew", "default", host_renew_kernel, integer_types(host_renew_kernel))
    return (*cases, reset, renew)


AOT_CASES = _aot_cases()
