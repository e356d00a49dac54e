"""Reference of the mirror of new rows to the host pool: one row and layer after another."""

from __future__ import annotations

import torch

from hisparsim_kernels.page_layout import PageLayout


def mirror_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    pool_rows: torch.Tensor,
    host_rows: torch.Tensor,
    count: int,
    layout: PageLayout,
    group: int,
) -> None:
    """Copy the first `count` entries' rows of every layer of `group` into `host` in place; -1 is skipped."""
    size, page = layout.row_bytes, layout.page_rows
    flat_pool = pool.reshape(-1)
    for pool_row, host_row in zip(pool_rows[:count].tolist(), host_rows[:count].tolist(), strict=True):
        if pool_row < 0 or host_row < 0:
            continue
        for layer in range(layout.group_layers[group]):
            source = (pool_row + layer * page) * size
            target = ((layout.first_layers[group] + layer) * page + host_row % page) * size
            host[host_row // page, target : target + size] = flat_pool[source : source + size]
