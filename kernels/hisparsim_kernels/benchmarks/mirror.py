"""Mirror of new rows to the host pool: the rows of a decode step, all layers of one group."""

from __future__ import annotations

import torch

from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references import mirror as reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof


def prepare(device: torch.device, row_bytes: int, rows: int) -> BenchRun:
    """Rows of scattered blocks to scattered host blocks, four layers."""
    generator = torch.Generator().manual_seed(4)
    layout = PageLayout.of_groups(row_bytes, (4,))
    blocks = -(-rows // 16)
    pool = torch.randint(0, 256, (blocks, layout.block_bytes), dtype=torch.uint8, generator=generator)
    host = torch.zeros(blocks, layout.host_block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    place = torch.randperm(blocks * layout.page_rows, generator=generator)[:rows]
    pool_rows = place // layout.page_rows * layout.rows_per_block + place % layout.page_rows
    host_rows = torch.randperm(blocks * layout.page_rows, generator=generator)[:rows].int().to(device)
    pool, pool_rows = pool.to(device), pool_rows.int().to(device)
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    return BenchRun(
        run=lambda: mirror_rows(pool, host, pool_rows, host_rows, count, layout, group=0),
        reference=lambda: reference.mirror_rows(pool, host, pool_rows, host_rows, rows, layout, 0),
        moved_bytes=rows * 4 * row_bytes,
    )


def _case(row_bytes: int, rows: int) -> BenchCase:
    return BenchCase(
        "mirror_rows",
        f"{rows} rows of {row_bytes} B, 4 layers",
        Roof.PCIE,
        lambda device: prepare(device, row_bytes, rows),
        tiny=rows <= 256,
    )


BENCH_CASES = tuple(_case(row_bytes, rows) for row_bytes in (656, 1152) for rows in (256, 8192))
