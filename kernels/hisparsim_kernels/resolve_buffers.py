"""Tables, scratch and outputs of the residency resolve, and the check of all of them before a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsim_kernels.errors import (
    check_contiguous,
    check_dtype,
    check_range,
    check_same_device,
    check_shape,
)
from hisparsim_kernels.hot_state import MAX_HOT_ROWS, HotState

MAX_QUERY_LEN = 8
INT32_ROWS = 2**31 - 1


@dataclass(frozen=True)
class ResidencyTables:
    """Persistent device tables of one layer group; shapes in the module's docstring.

    `host_generations` [num_host_blocks] int32 is that of `HostGenerations`. `page_rows` is 64 in the public
    systems."""

    resident_blocks: torch.Tensor
    host_blocks: torch.Tensor
    hot_blocks: torch.Tensor
    host_generations: torch.Tensor
    rows_per_block: int
    page_rows: int = 64


@dataclass(frozen=True)
class ResolveScratch:
    """Persistent scratch, shared by every group and layer; needs no clearing, whatever was in it.

    first_entry [batch, max_tokens] int16; wanted [batch, query_len * k] int32; entry_slots, same shape,
    int16; evictable, hits [batch, hot_rows] int16; counts [batch, 2] int32 (rows wanted, hits)"""

    first_entry: torch.Tensor
    wanted: torch.Tensor
    entry_slots: torch.Tensor
    evictable: torch.Tensor
    hits: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def allocate(
        batch: int, query_len: int, k: int, hot_rows: int, max_tokens: int, device: torch.device | str
    ) -> ResolveScratch:
        """Scratch for `batch` entries; most of it is 2 bytes x batch x max_tokens."""

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(batch, *shape, dtype=dtype, device=device)

        return ResolveScratch(
            first_entry=empty(torch.int16, max_tokens),
            wanted=empty(torch.int32, query_len * k),
            entry_slots=empty(torch.int16, query_len * k),
            evictable=empty(torch.int16, hot_rows),
            hits=empty(torch.int16, hot_rows),
            counts=empty(torch.int32, 2),
        )


@dataclass(frozen=True)
class ResolvePlan:
    """Outputs of a resolve, persistent; one plan serves the leader and all layers that follow its
    selection."""

    rows: torch.Tensor
    extents: torch.Tensor
    miss_host_rows: torch.Tensor
    miss_hot_rows: torch.Tensor
    num_misses: torch.Tensor
    stats: torch.Tensor

    @staticmethod
    def allocate(batch: int, query_len: int, k: int, device: torch.device | str) -> ResolvePlan:
        """A plan for `batch` entries, contents undefined until the first resolve."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        return ResolvePlan(
            rows=empty(batch * query_len, k),
            extents=empty(batch * query_len),
            miss_host_rows=empty(batch * query_len * k),
            miss_hot_rows=empty(batch * query_len * k),
            num_misses=empty(1),
            stats=empty(batch, 4),
        )


def _check_int(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    check_dtype(name, tensor, dtype)
    check_shape(name, tensor, shape)
    check_contiguous(name, tensor)


def check_resolve(
    selection: torch.Tensor,
    lengths: torch.Tensor,
    request_slots: torch.Tensor,
    tables: ResidencyTables,
    state: HotState,
    plan: ResolvePlan,
    scratch: ResolveScratch,
    query_len: int,
) -> None:
    """Raise the named error of `errors` that fits if an argument of `resolve` breaks its contract."""
    check_range("query_len", query_len, 1, MAX_QUERY_LEN, "query rows of one request")
    check_shape("lengths", lengths, (None,))
    check_shape("state.positions", state.positions, (None, None))
    batch = int(lengths.shape[0])
    _check_int("selection", selection, torch.int32, (batch * query_len, None))
    k, num_requests, hot_rows = int(selection.shape[1]), state.num_requests, state.hot_rows
    entries = query_len * k
    check_range("hot_rows", hot_rows, 1, MAX_HOT_ROWS, "slot ids are int16")
    check_range(
        "query_len * k", entries, 1, hot_rows,
        f"{query_len} query rows x top-k {k} are one working set and must fit into the {hot_rows} hot rows",
    )  # fmt: skip
    _check_int("lengths", lengths, torch.int32, (batch,))
    _check_int("request_slots", request_slots, torch.int32, (batch,))
    _check_int("resident_blocks", tables.resident_blocks, torch.int32, (num_requests, None))
    max_pages = int(tables.resident_blocks.shape[1])
    _check_int("host_blocks", tables.host_blocks, torch.int32, (num_requests, max_pages))
    _check_int("hot_blocks", tables.hot_blocks, torch.int32, (num_requests, None))
    _check_int("host_generations", tables.host_generations, torch.int32, (None,))
    check_range("page_rows", tables.page_rows, 1, 4096, "rows of one page")
    check_range(
        "rows_per_block", tables.rows_per_block, tables.page_rows, INT32_ROWS, "a block holds a page or more"
    )
    hot_pages = int(tables.hot_blocks.shape[1])
    check_range(
        "hot pages", hot_pages, -(-hot_rows // tables.page_rows), INT32_ROWS, f"they hold {hot_rows} hot rows"
    )
    host_rows = int(tables.host_generations.shape[0]) * tables.page_rows
    check_range("host rows", host_rows, 1, INT32_ROWS, "host row ids are int32")
    for name, tensor, dtype in (
        ("state.positions", state.positions, torch.int32),
        ("state.generations", state.generations, torch.int32),
        ("state.lru", state.lru, torch.int16),
    ):
        _check_int(name, tensor, dtype, (num_requests, hot_rows))
    for name, tensor, shape in (
        ("plan.rows", plan.rows, (batch * query_len, k)),
        ("plan.extents", plan.extents, (batch * query_len,)),
        ("plan.miss_host_rows", plan.miss_host_rows, (batch * entries,)),
        ("plan.miss_hot_rows", plan.miss_hot_rows, (batch * entries,)),
        ("plan.num_misses", plan.num_misses, (1,)),
        ("plan.stats", plan.stats, (batch, 4)),
    ):
        _check_int(name, tensor, torch.int32, shape)
    _check_int("scratch.first_entry", scratch.first_entry, torch.int16, (None, None))
    max_tokens = int(scratch.first_entry.shape[1])
    check_range(
        "max_tokens",
        max_tokens,
        1,
        max_pages * tables.page_rows,
        f"the tables hold {max_pages} pages a request",
    )
    for name, tensor, dtype, width in (
        ("scratch.wanted", scratch.wanted, torch.int32, entries),
        ("scratch.entry_slots", scratch.entry_slots, torch.int16, entries),
        ("scratch.evictable", scratch.evictable, torch.int16, hot_rows),
        ("scratch.hits", scratch.hits, torch.int16, hot_rows),
        ("scratch.counts", scratch.counts, torch.int32, 2),
    ):
        _check_int(name, tensor, dtype, (None, width))
    for name in ("first_entry", "wanted", "entry_slots", "evictable", "hits", "counts"):
        lines = int(getattr(scratch, name).shape[0])
        check_range(f"lines of scratch.{name}", lines, batch, INT32_ROWS, f"the batch has {batch} entries")
    check_same_device(
        selection=selection, lengths=lengths, request_slots=request_slots,
        resident_blocks=tables.resident_blocks,
        host_blocks=tables.host_blocks, hot_blocks=tables.hot_blocks,
        host_generations=tables.host_generations,
        positions=state.positions, generations=state.generations, lru=state.lru,
        rows=plan.rows, extents=plan.extents, miss_host_rows=plan.miss_host_rows,
        miss_hot_rows=plan.miss_hot_rows,
        num_misses=plan.num_misses, stats=plan.stats,
        first_entry=scratch.first_entry, wanted=scratch.wanted, entry_slots=scratch.entry_slots,
        evictable=scratch.evictable, hits=scratch.hits, counts=scratch.counts,
    )  # fmt: skip
