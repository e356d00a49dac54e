"""Residency resolve of a decode batch: about 13 % of the selected rows missing in each run.

Every run first gives an eighth of the host blocks a new generation, so that their rows miss again: a replay
does the work of a first run. The launch that does so is part of the time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks
from hisparsim_kernels.references.lru import HostRow, SequentialHotBuffer
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch

PAGE_ROWS = 64


@dataclass(frozen=True)
class Sizes:
    """One batch: requests, query rows and top-k of each, hot rows, context pages."""

    batch: int
    query_len: int
    k: int
    hot_rows: int
    pages: int


def prepare(device: torch.device, sizes: Sizes) -> BenchRun:
    """A twentieth of the pages resident, every page on the host; query rows share seven eighths of their
    selection."""
    generator = torch.Generator().manual_seed(5)
    batch, k, query_len, pages = sizes.batch, sizes.k, sizes.query_len, sizes.pages
    resident = torch.where(torch.rand(batch, pages, generator=generator) < 0.05, 7, -1).int().to(device)
    host = torch.randperm(batch * pages, generator=generator).int().view(batch, pages)
    hosts = HostGenerations.allocate(batch * pages, device)
    hot_pages = -(-sizes.hot_rows // PAGE_ROWS)
    hot = (torch.arange(batch * hot_pages, dtype=torch.int32).view(batch, hot_pages) + 100).to(device)
    tables = ResidencyTables(resident, host.to(device), hot, hosts.generations, rows_per_block=320)
    order = torch.stack([torch.randperm(pages * PAGE_ROWS, generator=generator) for _ in range(batch)])
    shift = k // 8
    rows = [order[:, query * shift : query * shift + k].sort(dim=1).values for query in range(query_len)]
    selection = torch.stack(rows, dim=1).reshape(batch * query_len, k).int().to(device)
    lengths = torch.full((batch,), pages * PAGE_ROWS, dtype=torch.int32, device=device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    state = HotStates.allocate(1, batch, sizes.hot_rows, device).group(0)
    plan = ResolvePlan.allocate(batch, query_len, k, device)
    scratch = ResolveScratch.allocate(batch, query_len, k, sizes.hot_rows, pages * PAGE_ROWS, device)
    stale = host[:, ::8].flatten().contiguous().to(device)
    model = SequentialHotBuffer(sizes.hot_rows)
    wanted = [
        HostRow(row // PAGE_ROWS, row % PAGE_ROWS, 0) for row in selection[:query_len].flatten().tolist()
    ]

    def run() -> None:
        renew_host_blocks(hosts, stale)
        resolve(selection, lengths, slots, tables, state, plan, scratch, query_len=query_len)

    def reference() -> None:
        for _ in range(batch):
            model.step(wanted)

    return BenchRun(
        run, reference, moved_bytes=batch * (sizes.hot_rows * (2 + 4 + 2) + query_len * k * (4 + 4))
    )


def _case(name: str, sizes: Sizes, tiny: bool = False) -> BenchCase:
    return BenchCase("resolve", name, Roof.HBM, lambda device: prepare(device, sizes), tiny=tiny)


BENCH_CASES = (
    _case("tiny: 4 requests, top-k 128", Sizes(4, 1, 128, 256, 40), tiny=True),
    _case("8 requests, top-k 2048, 4096 hot rows", Sizes(8, 1, 2048, 4096, 1280)),
    _case("16 requests, top-k 2048, 4096 hot rows", Sizes(16, 1, 2048, 4096, 1280)),
    _case("128 requests, top-k 2048, 4096 hot rows", Sizes(128, 1, 2048, 4096, 1280)),
    _case("16 requests, 4 x 2048, 10240 hot rows", Sizes(16, 4, 2048, 10240, 1280)),
)
