"""Whole pages over PCIe, both ways, and prefill staging with half of the pages resident."""

from __future__ import annotations

import torch

from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
from hisparsim_kernels.references.gather import copy_page_reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof

LAYOUT = PageLayout.of_groups(656, (2, 4, 4, 4), indexer_page_bytes=177_408)


def _pools(device: torch.device, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    host = torch.empty(pages, LAYOUT.host_block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.random_(0, 256, generator=generator)
    pool = torch.randint(0, 256, (pages, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    return host, pool.to(device)


def prepare_copy(device: torch.device, pages: int, direction: Direction) -> BenchRun:
    """One group's pages between scattered GPU blocks and scattered host blocks."""
    host, pool = _pools(device, pages)
    tables = GroupTables.of(LAYOUT, device)
    generator = torch.Generator().manual_seed(8)
    blocks, host_blocks = (torch.randperm(pages, generator=generator).int() for _ in range(2))
    pairs = list(zip(blocks.tolist(), host_blocks.tolist(), strict=True))
    blocks, host_blocks = blocks.to(device), host_blocks.to(device)
    groups = torch.ones(pages, dtype=torch.int32, device=device)
    count = torch.tensor([pages], dtype=torch.int32, device=device)

    def run() -> None:
        copy_pages(host, pool, blocks, host_blocks, groups, count, LAYOUT, tables, direction)

    def reference() -> None:
        for block, host_block in pairs:
            copy_page_reference(
                host, pool, block, host_block, LAYOUT, 1, to_host=direction is Direction.TO_HOST
            )

    return BenchRun(run, reference, moved_bytes=pages * LAYOUT.group_layers[1] * LAYOUT.page_bytes)


def prepare_staging(device: torch.device, pages: int) -> BenchRun:
    """One layer of pages, every other one from the host; only those count as moved over the bus."""
    host, pool = _pools(device, pages)
    numbers = torch.arange(pages, dtype=torch.int32)
    blocks = torch.where(numbers % 2 == 0, numbers, -1).to(device)
    host_blocks = numbers.flip(0).contiguous().to(device)
    staged = torch.zeros(pages * LAYOUT.page_rows, LAYOUT.row_bytes, dtype=torch.uint8, device=device)
    lines = staged.view(pages, LAYOUT.page_bytes)
    in_host = LAYOUT.first_layers[1] * LAYOUT.page_bytes

    def run() -> None:
        stage_pages(host, pool, blocks, host_blocks, staged, LAYOUT, group=1, layer_in_group=0)

    def reference() -> None:
        lines[0::2] = pool[0::2, : LAYOUT.page_bytes]
        lines[1::2] = host.flip(0)[1::2, in_host : in_host + LAYOUT.page_bytes].to(device)

    return BenchRun(run, reference, moved_bytes=pages // 2 * LAYOUT.page_bytes)


def _copy(pages: int, direction: Direction) -> BenchCase:
    return BenchCase(
        "copy_pages",
        f"{pages} pages of 4 layers, {direction.value}",
        Roof.PCIE,
        lambda device: prepare_copy(device, pages, direction),
        tiny=pages <= 8,
    )


def _staging(pages: int) -> BenchCase:
    return BenchCase(
        "stage_pages",
        f"{pages} pages of 656 B rows, half from the host",
        Roof.PCIE,
        lambda device: prepare_staging(device, pages),
        tiny=pages <= 8,
    )


BENCH_CASES = (
    *(_copy(pages, direction) for pages in (8, 512) for direction in Direction),
    *(_staging(pages) for pages in (8, 1024)),
)
