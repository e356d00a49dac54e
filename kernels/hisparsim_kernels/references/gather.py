"""Rows and pages copied one at a time with torch indexing: the meaning of `gather` and `pages`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hisparsim_kernels.page_layout import PageLayout


def host_row(host: torch.Tensor, layout: PageLayout, row: int, layer: int) -> torch.Tensor:
    """Bytes [row_bytes] of host row `row` (block * page_rows + row) in `layer`, a view of the host pool."""
    block, at = divmod(row, layout.page_rows)
    begin = (layer * layout.page_rows + at) * layout.row_bytes
    return host.view(-1, layout.host_block_bytes)[block, begin : begin + layout.row_bytes]


def pool_row(pool: torch.Tensor, layout: PageLayout, row: int, layer_in_group: int) -> torch.Tensor:
    """Bytes [row_bytes] of flat row `row` of a layer of a group, a view of the GPU pool."""
    begin = (row + layer_in_group * layout.page_rows) * layout.row_bytes
    return pool.view(-1)[begin : begin + layout.row_bytes]


def gather_rows_reference(
    host: torch.Tensor, pool: torch.Tensor, misses: Iterable[tuple[int, int]], layout: PageLayout, group: int
) -> None:
    """Copy each (host row, flat row) in every layer of the group."""
    for source, target in misses:
        for layer in range(layout.group_layers[group]):
            row = host_row(host, layout, source, layout.first_layers[group] + layer)
            pool_row(pool, layout, target, layer).copy_(row)


def copy_page_reference(
    host: torch.Tensor,
    pool: torch.Tensor,
    block: int,
    host_block: int,
    layout: PageLayout,
    group: int,
    to_host: bool,
) -> None:
    """Copy one group's page between a GPU block and its place in a host block."""
    num_bytes = layout.group_layers[group] * layout.page_bytes
    begin = layout.first_layers[group] * layout.page_bytes
    in_host = host.view(-1, layout.host_block_bytes)[host_block, begin : begin + num_bytes]
    in_pool = pool.view(-1, layout.block_bytes)[block, :num_bytes]
    if to_host:
        in_host.copy_(in_pool)
    else:
        in_pool.copy_(in_host)
