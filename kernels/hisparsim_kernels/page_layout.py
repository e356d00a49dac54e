"""Where the bytes of a page lie: GPU blocks by layer group, host blocks with all layers.

    GPU block   block_bytes       the layers of ONE group, one page each, then unused bytes
                                  layer i of the group, row r  at  (i * page_rows + r) * row_bytes
    host block  host_block_bytes  ALL layers, one page each, then unused bytes
                                  layer l, row r               at  (l * page_rows + r) * row_bytes

A group is a run of consecutive layers that share one physical page (an indexer layer and the layers that
follow its selection are never split). GPU blocks also hold indexer pages, so a block is the larger of the
two, rounded up to whole layer pages; with 656-byte rows, 78 layers in groups of at most 4, and a 177,408-byte
indexer page that is 209,920 bytes (vLLM 0.33's layout). Host blocks are rounded up to 4 KiB: 3,276,800 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hisparsim_kernels.errors import (
    RangeError,
    StrideError,
    check_contiguous,
    check_dtype,
    check_range,
    check_shape,
)

CHUNK_BYTES = 16
"""Unit of every copy: one 16-byte load."""
MAX_ROW_BYTES = 65536
HOST_ALIGNMENT_BYTES = 4096


def _check_sizes(row_bytes: int, page_rows: int, group_layers: Sequence[int]) -> None:
    check_range("row_bytes", row_bytes, CHUNK_BYTES, MAX_ROW_BYTES, "bytes of one token in one layer")
    check_range("page_rows", page_rows, 1, 4096, "rows of one page")
    if not group_layers or min(group_layers) < 1:
        raise RangeError(f"group_layers is {tuple(group_layers)}; every group needs at least one layer")


@dataclass(frozen=True)
class PageLayout:
    """Bytes of rows, pages and blocks, and the layers of each group. Raises `StrideError` or `RangeError` if
    rows are not multiples of 16 bytes or a block is too small for what it must hold."""

    row_bytes: int
    group_layers: tuple[int, ...]
    block_bytes: int
    host_block_bytes: int
    page_rows: int = 64

    def __post_init__(self) -> None:
        _check_sizes(self.row_bytes, self.page_rows, self.group_layers)
        for name in ("row_bytes", "host_block_bytes"):
            if getattr(self, name) % CHUNK_BYTES:
                raise StrideError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {CHUNK_BYTES}, the load size"
                )
        if self.block_bytes % self.page_bytes:
            raise StrideError(
                f"block_bytes is {self.block_bytes}; it must be a multiple of one layer's page, "
                f"{self.page_bytes} bytes"
            )
        largest = max(self.group_layers) * self.page_bytes
        check_range(
            "block_bytes", self.block_bytes, largest, 2**31 - 1, f"the largest group has {largest} bytes"
        )
        every = sum(self.group_layers) * self.page_bytes
        check_range(
            "host_block_bytes", self.host_block_bytes, every, 2**31 - 1, f"all layers have {every} bytes"
        )

    @staticmethod
    def of_groups(
        row_bytes: int, group_layers: Sequence[int], indexer_page_bytes: int = 0, page_rows: int = 64
    ) -> PageLayout:
        """Blocks as small as the rules allow, for groups of the given numbers of layers.

        Raises what `PageLayout` raises."""
        _check_sizes(row_bytes, page_rows, group_layers)
        page_bytes = page_rows * row_bytes
        block_pages = max(max(group_layers), -(-indexer_page_bytes // page_bytes))
        every = sum(group_layers) * page_bytes
        return PageLayout(
            row_bytes=row_bytes,
            group_layers=tuple(group_layers),
            block_bytes=block_pages * page_bytes,
            host_block_bytes=-(-every // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES,
            page_rows=page_rows,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.page_rows * self.row_bytes

    @property
    def rows_per_block(self) -> int:
        """Rows of a GPU block, unused ones included: the stride of flat rows from block to block."""
        return self.block_bytes // self.row_bytes

    @property
    def first_layers(self) -> tuple[int, ...]:
        """First layer of each group."""
        return tuple(accumulate(self.group_layers, initial=0))[:-1]

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(self.group_layers)

    def check_group(self, group: int) -> None:
        """Raise `RangeError` unless `group` exists."""
        check_range(
            "group", group, 0, len(self.group_layers) - 1, f"the layout has {len(self.group_layers)} groups"
        )

    def layer_rows(self, pool: torch.Tensor, layer_in_group: int) -> torch.Tensor:
        """The GPU pool ([num_blocks, block_bytes] uint8) as rows [n, row_bytes] of one layer of a group: row
        i of the result is flat row i of that layer. Forgetting the layer would read another layer's rows.

        Raises `RangeError` for a layer that no group has, `DtypeError`, `ShapeError` or `StrideError` for a
        pool that is not contiguous blocks of bytes."""
        check_dtype("pool", pool, torch.uint8)
        check_shape("pool", pool, (None, self.block_bytes))
        check_contiguous("pool", pool)
        check_range(
            "layer_in_group", layer_in_group, 0, max(self.group_layers) - 1, "layers of the largest group"
        )
        rows = pool.view(-1, self.row_bytes)
        return rows[layer_in_group * self.page_rows :]


@dataclass(frozen=True)
class GroupTables:
    """First layer and number of layers of each group, [num_groups] int32 on the device, for `pages`."""

    first_layers: torch.Tensor
    num_layers: torch.Tensor

    @staticmethod
    def of(layout: PageLayout, device: torch.device | str) -> GroupTables:
        """Copy the layout's group tables to a device once, at start-up."""
        return GroupTables(
            torch.tensor(layout.first_layers, dtype=torch.int32, device=device),
            torch.tensor(layout.group_layers, dtype=torch.int32, device=device),
        )
