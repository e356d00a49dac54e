"""Which pages a prefill chunk's earlier context is read from, each distinct page once.

The plan is made on the host from the ledgers' block ids (numpy), before the step: prefill is not captured in
a graph. Two requests that share a prefix share its host blocks, so their common pages are staged once; a page
that is resident for any of them is copied from the GPU instead of over the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hisparsim_kernels.errors import (
    DtypeError,
    KernelInputError,
    ShapeError,
    check_dtype,
    check_range,
    check_shape,
)


class MissingPageError(KernelInputError):
    """A page of the context has neither a resident block nor a complete host copy."""


@dataclass(frozen=True)
class StagingPlan:
    """Sources of the staged pages and where each request's pages went.

    blocks        [n] int32            resident GPU block of staged page i, -1: take it from the host
    host_blocks   [n] int32            its host block, -1 where there is none
    staged_pages  [requests, pages]    int32, index of the staged page, -1 past a request's context
    """

    blocks: torch.Tensor
    host_blocks: torch.Tensor
    staged_pages: torch.Tensor

    @property
    def num_pages(self) -> int:
        """Distinct pages staged."""
        return int(self.blocks.shape[0])

    @property
    def num_host_pages(self) -> int:
        """Pages that cross the bus."""
        return int((self.blocks < 0).sum())

    def to(self, device: torch.device | str) -> StagingPlan:
        """The plan on a device."""
        return StagingPlan(self.blocks.to(device), self.host_blocks.to(device), self.staged_pages.to(device))


def plan_staging(
    resident_blocks: npt.NDArray[np.int32], host_blocks: npt.NDArray[np.int32], num_pages: Sequence[int]
) -> StagingPlan:
    """Plan the staging of the first `num_pages[i]` pages of each request i.

    resident_blocks, host_blocks [requests, pages] int32: of one group, negative for none. A page is known by
    its host block, or by its resident block while it has no host copy. Raises `MissingPageError` naming the
    first page that can be read from neither, `RangeError` if a request has more pages than the tables,
    `ShapeError` or `DtypeError` for tables that do not match."""
    for name, table in (("resident_blocks", resident_blocks), ("host_blocks", host_blocks)):
        if not np.issubdtype(table.dtype, np.integer):
            raise DtypeError(f"{name} has dtype {table.dtype}; it must be int32")
        if table.ndim != 2 or table.shape != host_blocks.shape or len(table) != len(num_pages):
            raise ShapeError(
                f"{name} has shape {table.shape}; it must be (requests, pages) as host_blocks of shape "
                f"{host_blocks.shape}, with the {len(num_pages)} requests of num_pages"
            )
    staged_pages = np.full(host_blocks.shape, -1, dtype=np.int32)
    index: dict[tuple[str, int], int] = {}
    blocks: list[int] = []
    hosts: list[int] = []
    for request, count in enumerate(num_pages):
        check_range("num_pages", count, 0, host_blocks.shape[1], f"pages of request {request} in the tables")
        for page in range(count):
            block, host = int(resident_blocks[request, page]), int(host_blocks[request, page])
            if block < 0 and host < 0:
                raise MissingPageError(
                    f"page {page} of batch entry {request} has resident block {block} and host block {host}; "
                    "one of them must be valid: the page was let go before its host copy was complete"
                )
            key = ("host", host) if host >= 0 else ("gpu", block)
            at = index.setdefault(key, len(blocks))
            if at == len(blocks):
                blocks.append(-1)
                hosts.append(host)
            if block >= 0:
                blocks[at] = block
            staged_pages[request, page] = at
    return StagingPlan(
        torch.tensor(blocks, dtype=torch.int32),
        torch.tensor(hosts, dtype=torch.int32),
        torch.from_numpy(staged_pages),
    )


def staged_rows(selection: torch.Tensor, staged_pages: torch.Tensor, page_rows: int = 64) -> torch.Tensor:
    """Flat rows of the staging buffer for selected positions.

    selection [tokens, k] int32 with -1 for none; staged_pages [tokens, pages] int32, the line of each token's
    request. Positions outside the staged pages become -1. Raises `DtypeError`, `ShapeError` or `RangeError`
    for arguments that are not these."""
    check_dtype("selection", selection, torch.int32)
    check_shape("selection", selection, (None, None))
    check_dtype("staged_pages", staged_pages, torch.int32)
    check_shape("staged_pages", staged_pages, (selection.shape[0], None))
    check_range("page_rows", page_rows, 1, 4096, "rows of one page")
    if staged_pages.shape[1] == 0:
        return torch.full_like(selection, -1)
    page = torch.div(selection, page_rows, rounding_mode="floor").long()
    inside = (selection >= 0) & (page < staged_pages.shape[1])
    staged = torch.gather(staged_pages, 1, torch.where(inside, page, 0))
    rows = staged * page_rows + selection % page_rows
    return torch.where(inside & (staged >= 0), rows, -1).to(torch.int32)
