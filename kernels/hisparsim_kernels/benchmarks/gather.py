"""Gather of missed rows over PCIe: by row size, layers in a launch and programs (bytes in flight)."""

from __future__ import annotations

import torch

from hisparsim_kernels.gather import DEFAULT_PROGRAMS, gather_rows
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references.gather import gather_rows_reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof

MISSES = 4384
"""16 requests x 274 rows: the miss rate published for an LRU of 4096 rows (13.4 % of 2048)."""
HOST_POOL_BYTES = 1 << 29
"""Past the L2 cache of the device, so that every row crosses the bus."""


def prepare(device: torch.device, row_bytes: int, layers: int, misses: int, programs: int) -> BenchRun:
    """Scattered host rows to scattered hot rows."""
    generator = torch.Generator().manual_seed(6)
    layout = PageLayout.of_groups(row_bytes, (layers,))
    on_gpu = device.type == "cuda"
    host_blocks = max(2, (HOST_POOL_BYTES if on_gpu else 1 << 22) // layout.host_block_bytes)
    host = torch.empty(host_blocks, layout.host_block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    host.random_(0, 256, generator=generator)
    blocks = -(-misses // layout.page_rows)
    pool = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
    at = torch.randperm(blocks * layout.page_rows, generator=generator)[:misses]
    hot_rows = (at // layout.page_rows * layout.rows_per_block + at % layout.page_rows).int()
    host_rows = torch.randint(0, host_blocks * layout.page_rows, (misses,), generator=generator).int()
    pairs = list(zip(host_rows.tolist(), hot_rows.tolist(), strict=True))
    miss_host, miss_hot = host_rows.to(device), hot_rows.to(device)
    count = torch.tensor([misses], dtype=torch.int32, device=device)

    def run() -> None:
        gather_rows(host, pool, miss_host, miss_hot, count, layout, group=0, num_programs=programs)

    def reference() -> None:
        gather_rows_reference(host, pool, pairs, layout, 0)

    return BenchRun(run, reference, moved_bytes=misses * layers * row_bytes)


def _case(row_bytes: int, layers: int, misses: int = MISSES, programs: int = DEFAULT_PROGRAMS) -> BenchCase:
    return BenchCase(
        "gather_rows",
        f"{misses} rows of {row_bytes} B, {layers} layers, {programs} programs",
        Roof.PCIE,
        lambda device: prepare(device, row_bytes, layers, misses, programs),
        tiny=misses <= 256,
    )


BENCH_CASES = (
    _case(656, 1, misses=256),
    *(_case(row_bytes, 1) for row_bytes in (128, 256, 656, 1152, 2048, 4096)),
    *(_case(row_bytes, 4) for row_bytes in (656, 1152)),
    *(_case(656, 4, programs=programs) for programs in (4, 8, 16, 64, 128)),
)
