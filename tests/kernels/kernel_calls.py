"""One launch of each kernel on persistent tensors, to run again, in another order, or without its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
from hisparsim_kernels.rows import read_rows, write_rows
from hisparsim_kernels.topk import TopkScratch, topk, topk_config

LAYOUT = PageLayout.of_groups(1152, (2,), page_rows=16)


class Call:
    """One launch on persistent tensors: `run` enqueues it, `values` change, `outputs` are compared."""

    def __init__(
        self, run: Callable[[], None], values: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
    ) -> None:
        self.run, self.values, self.outputs = run, values, outputs


def decode_call(kind: str) -> Call:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(200, 576, generator=generator).bfloat16()
    q = torch.randn(3, 8, 576, generator=generator).bfloat16()
    slots = torch.randint(-1, 200, (3, 96), generator=generator).int()
    counts = torch.tensor([96, 30, 0], dtype=torch.int32)
    out, lse = torch.empty(3, 8, 512), torch.empty(3, 8)
    scale, scratch = 1 / math.sqrt(256), DecodeScratch.create(3, 8, 4, "cpu")

    def run() -> None:
        if kind == "decode":
            sparse_mla_decode(
                q, pool, slots, counts, scale=scale, out=out, lse=lse, scratch=scratch, num_splits=4
            )
        else:
            sparse_mla_prefill(q, pool, slots, counts, scale=scale, out=out, lse=lse)

    return Call(run, {"counts": counts, "slots": slots}, {"out": out, "lse": lse})


def indexer_call() -> Call:
    generator = torch.Generator().manual_seed(4)
    pages = torch.zeros(9, 64 * 132, dtype=torch.uint8)
    keys = torch.randn(9 * 64, 128, generator=generator)
    write_index_keys(keys, torch.arange(9 * 64).int(), pages, page_size=64, key_format=KeyFormat.E4M3)
    q = torch.randn(3, 2, 32, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(3, 2, 32, generator=generator)
    table = torch.randperm(9, generator=generator).int().reshape(3, 3).contiguous()
    lengths = torch.tensor([192, 70, 0], dtype=torch.int32)
    logits = torch.empty(3, 2, 192)

    def run() -> None:
        indexer_logits(q, weights, pages, table, lengths, logits, page_size=64, fill=True)

    return Call(run, {"lengths": lengths}, {"logits": logits})


def topk_call() -> Call:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 512, generator=generator)
    lengths = torch.tensor([512, 40, 0], dtype=torch.int32)
    indices, counts = torch.empty(3, 64, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    splits = int(topk_config(512, torch.device("cpu"))[1].meta["NUM_SPLITS"])
    scratch = TopkScratch.allocate(3, splits, "cpu")

    def run() -> None:
        topk(logits, lengths, 64, indices=indices, counts=counts, scratch=scratch)

    return Call(run, {"lengths": lengths}, {"indices": indices, "counts": counts})


def gemm_call() -> Call:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(40, 256, generator=generator).bfloat16()
    weight = torch.randn(3, 128, 256, generator=generator).bfloat16()
    offsets = torch.tensor([0, 7, 7, 33], dtype=torch.int32)
    out = torch.empty(40, 128)
    return Call(lambda: grouped_gemm(x, weight, offsets, out), {"offsets": offsets}, {"out": out})


def rows_call() -> Call:
    generator = torch.Generator().manual_seed(7)
    latent, rope = torch.randn(9, 512, generator=generator), torch.randn(9, 64, generator=generator)
    slots = torch.tensor([3, -1, 5, 0, 8, -1, 9, 2, 1], dtype=torch.int32)
    pool, back = torch.zeros(10, 576, dtype=torch.bfloat16), torch.empty(9, 576, dtype=torch.bfloat16)

    def run() -> None:
        write_rows(latent, rope, slots, pool)
        read_rows(pool, slots, back)

    return Call(run, {"slots": slots}, {"back": back})


def transfer_call() -> Call:
    generator = torch.Generator().manual_seed(8)
    pool = torch.randint(0, 256, (4, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
    rows = (LAYOUT.rows_per_block + torch.arange(16)).int()
    host_rows = torch.randperm(48, generator=generator)[:16].int()
    hot = (3 * LAYOUT.rows_per_block + torch.arange(16)).int()
    count = torch.tensor([16], dtype=torch.int32)

    def run() -> None:
        mirror_rows(pool, host, rows, host_rows, count, LAYOUT, group=0)
        gather_rows(host, pool, host_rows, hot, count, LAYOUT, group=0)

    return Call(run, {"count": count, "host_rows": host_rows}, {})


CALLS: dict[str, Callable[[], Call]] = {
    "mla_decode": lambda: decode_call("decode"),
    "mla_prefill": lambda: decode_call("prefill"),
    "indexer": indexer_call,
    "topk": topk_call,
    "grouped_gemm": gemm_call,
    "rows": rows_call,
    "mirror-and-gather": transfer_call,
}


EACH_CALL = pytest.mark.parametrize("name", CALLS)


def resolve_call() -> Call:
    tables = ResidencyTables(
        torch.full((2, 6), -1, dtype=torch.int32), torch.arange(12, dtype=torch.int32).view(2, 6),
        torch.arange(8, dtype=torch.int32).view(2, 4), torch.zeros(20, dtype=torch.int32),
        rows_per_block=8, page_rows=4,
    )  # fmt: skip
    states = HotStates.allocate(1, 2, 16, "cpu")
    state, plan = states.group(0), ResolvePlan.allocate(2, 2, 8, "cpu")
    scratch = ResolveScratch.allocate(2, 2, 8, 16, 24, "cpu")
    selection, lengths = torch.arange(32, dtype=torch.int32).view(4, 8) % 24, torch.full((2,), 24).int()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    hosts, blocks = (
        HostGenerations(tables.host_generations, torch.zeros(1).int()),
        torch.tensor([3, -1]).int(),
    )

    def run() -> None:
        reset_requests(states, slots)
        renew_host_blocks(hosts, blocks)
        resolve(selection, lengths, slots, tables, state, plan, scratch, query_len=2)

    return Call(run, {"selection": selection, "lengths": lengths, "slots": slots, "blocks": blocks}, {})


def pages_call() -> Call:
    generator = torch.Generator().manual_seed(8)
    pool = torch.randint(0, 256, (4, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
    blocks, host_blocks = torch.tensor([3, 0, 2]).int(), torch.tensor([0, 2, -1]).int()
    groups, count = torch.zeros(3, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    tables = GroupTables.of(LAYOUT, "cpu")
    staged = torch.zeros(48, 1152, dtype=torch.uint8)

    def run() -> None:
        for direction in Direction:
            copy_pages(host, pool, blocks, host_blocks, groups, count, LAYOUT, tables, direction)
        stage_pages(host, pool, blocks, host_blocks, staged, LAYOUT, group=0, layer_in_group=1)

    return Call(run, {"blocks": blocks, "host_blocks": host_blocks, "count": count}, {})


# Host code only: `resolve` changes its own state, so a second run is another step; `test_resolve` replays it.
HOST_CALLS = CALLS | {"resolve": resolve_call, "pages": pages_call}


EACH_HOST_CALL = pytest.mark.parametrize("name", HOST_CALLS)
