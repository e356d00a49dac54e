# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Whole pages between GPU blocks and host blocks, and prefill staging into a temporary buffer.

    pool        [num_blocks, block_bytes]            uint8; one group's layers of a page in each block
    host        [num_host_blocks, host_block_bytes]  uint8 pinned, or an int64 address (see `host_pool`)
    blocks      [n] int32                            GPU blocks; one page of one group each
    host_blocks [n] int32                            their host blocks; negative skips the entry (padding)
    groups      [n] int32                            their groups
    num_pages   [1] int32, entries in use

`copy_pages` moves every page of a list in one launch and one direction: write-back of sealed pages, restore
of lost ones. `stage_pages` collects one layer of the pages that a prefill chunk attends to, each distinct
page once, from its resident block where there is one and from the host elsewhere, into `staged` [max_pages *
page_rows, row_bytes]. Which pages those are is decided on the host (`staging`), since prefill is not captured
in a graph. Both use a fixed grid of programs that walk over tiles of CHUNKS contiguous 16-byte chunks."""

from __future__ import annotations

from enum import Enum

import torch
import triton
import triton.language as tl

from hisparsim_kernels.aot_types import integer_types
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.errors import (
    StrideError,
    check_contiguous,
    check_dtype,
    check_range,
    check_same_device,
    check_shape,
)
from hisparsim_kernels.host_pool import HostPool, host_argument, pool_argument
from hisparsim_kernels.page_layout import CHUNK_BYTES, GroupTables, PageLayout
from hisparsim_kernels.registry import AotCase

DEFAULT_PROGRAMS = 32


class Direction(Enum):
    """Which way pages go."""

    TO_HOST = "to_host"
    TO_GPU = "to_gpu"


@triton.jit(do_not_specialize=["max_pages"])
def copy_pages_kernel(
    host_ptr, pool_ptr, blocks_ptr, host_blocks_ptr, groups_ptr, num_pages_ptr, first_layers_ptr,
    num_layers_ptr,
    block_bytes, host_block_bytes, max_pages,
    PAGE_BYTES: tl.constexpr, MAX_LAYERS: tl.constexpr, TO_HOST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (a fixed number of programs): each takes every so many-th tile of CHUNKS chunks of some page."""
    TILES: tl.constexpr = (MAX_LAYERS * PAGE_BYTES // 16 + CHUNKS - 1) // CHUNKS
    host = tl.multiple_of(host_ptr.to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, CHUNKS * 4)
    num_pages = tl.minimum(tl.load(num_pages_ptr), max_pages)
    for task in range(tl.program_id(0), num_pages * TILES, tl.num_programs(0)):
        entry = task // TILES
        block = tl.load(blocks_ptr + entry).to(tl.int64)
        host_block = tl.load(host_blocks_ptr + entry).to(tl.int64)
        if (block >= 0) & (host_block >= 0):
            group = tl.load(groups_ptr + entry)
            first_layer = tl.load(first_layers_ptr + group)
            page_words = tl.load(num_layers_ptr + group) * (PAGE_BYTES // 4)
            word = (task % TILES) * (CHUNKS * 4) + words
            # PAGE_BYTES is a multiple of 16: the bound is, too, and the loads stay 16 bytes wide.
            mask = word < tl.multiple_of(page_words, 4)
            in_pool = pool_ptr + tl.multiple_of(block * (block_bytes // 16) * 4, 4)
            in_host = host + tl.multiple_of(
                host_block * (host_block_bytes // 16) * 4 + first_layer.to(tl.int64) * (PAGE_BYTES // 4), 4
            )
            if TO_HOST:
                tl.store(in_host + word, tl.load(in_pool + word, mask=mask, cache_modifier=".cg"), mask=mask)
            else:
                tl.store(in_pool + word, tl.load(in_host + word, mask=mask, cache_modifier=".cg"), mask=mask)


@triton.jit(do_not_specialize=["host_layer", "layer_in_group", "num_staged"])
def stage_pages_kernel(
    host_ptr, pool_ptr, blocks_ptr, host_blocks_ptr, staged_ptr,
    block_bytes, host_block_bytes, host_layer, layer_in_group, num_staged,
    PAGE_BYTES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (a fixed number of programs): tiles of the staged pages, each from its block or from the host."""
    TILES: tl.constexpr = (PAGE_BYTES // 16 + CHUNKS - 1) // CHUNKS
    host = tl.multiple_of(host_ptr.to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, CHUNKS * 4)
    for task in range(tl.program_id(0), num_staged * TILES, tl.num_programs(0)):
        entry = tl.cast(task // TILES, tl.int64)
        word = (task % TILES) * (CHUNKS * 4) + words
        mask = word < PAGE_BYTES // 4
        staged = staged_ptr + tl.multiple_of(entry * (PAGE_BYTES // 4), 4)
        block = tl.load(blocks_ptr + entry).to(tl.int64)
        if block >= 0:
            in_pool = block * (block_bytes // 16) * 4 + layer_in_group.to(tl.int64) * (PAGE_BYTES // 4)
            data = tl.load(pool_ptr + tl.multiple_of(in_pool, 4) + word, mask=mask, cache_modifier=".cg")
            tl.store(staged + word, data, mask=mask)
        else:
            host_block = tl.load(host_blocks_ptr + entry).to(tl.int64)
            in_host = host_block * (host_block_bytes // 16) * 4 + host_layer.to(tl.int64) * (PAGE_BYTES // 4)
            source = host + tl.multiple_of(in_host, 4) + word
            data = tl.load(source, mask=mask & (host_block >= 0), other=0, cache_modifier=".cg")
            tl.store(staged + word, data, mask=mask)


def _check_list(length: int, **lists: torch.Tensor) -> None:
    for name, tensor in lists.items():
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, (length,))
        check_contiguous(name, tensor)


def copy_pages(
    host: HostPool,
    pool: torch.Tensor,
    blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    groups: torch.Tensor,
    num_pages: torch.Tensor,
    layout: PageLayout,
    tables: GroupTables,
    direction: Direction,
    *,
    num_programs: int = DEFAULT_PROGRAMS,
    config: LaunchConfig | None = None,
) -> None:
    """Copy the listed pages between their GPU blocks and host blocks, one launch.

    The host bytes of a page exist only after the launch has ended: whoever lets a GPU block go, or reads the
    page from the host on another stream, orders that by an event. Raises `DtypeError`, `ShapeError`,
    `StrideError`, `DeviceError` or `RangeError` before anything is launched."""
    check_shape("blocks", blocks, (None,))
    max_pages = blocks.shape[0]
    _check_list(max_pages, blocks=blocks, host_blocks=host_blocks, groups=groups)
    _check_list(1, num_pages=num_pages)
    _check_list(len(layout.group_layers), first_layers=tables.first_layers, num_layers=tables.num_layers)
    check_same_device(
        pool=pool, blocks=blocks, host_blocks=host_blocks, groups=groups, num_pages=num_pages,
        first_layers=tables.first_layers, num_layers=tables.num_layers,
    )  # fmt: skip
    check_range("num_programs", num_programs, 1, 65535, "a small fixed grid")
    host_words, pool_words = host_argument(host, pool, layout), pool_argument(pool, layout)
    if max_pages == 0:
        return
    config = config or find_config("pages", "copy_pages", "default", arch_of(pool.device))
    copy_pages_kernel[(num_programs,)](
        host_words, pool_words, blocks, host_blocks, groups, num_pages, tables.first_layers,
        tables.num_layers,
        layout.block_bytes, layout.host_block_bytes, max_pages,
        PAGE_BYTES=layout.page_bytes, MAX_LAYERS=max(layout.group_layers),
        TO_HOST=direction is Direction.TO_HOST,
        **config.launch_arguments(),
    )  # fmt: skip


def stage_pages(
    host: HostPool,
    pool: torch.Tensor,
    blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    staged: torch.Tensor,
    layout: PageLayout,
    *,
    group: int,
    layer_in_group: int,
    num_programs: int = DEFAULT_PROGRAMS,
    config: LaunchConfig | None = None,
) -> None:
    """Copy one layer of the pages of a `StagingPlan` into `staged` [>= pages * page_rows, row_bytes] uint8.

    Page i comes from `blocks[i]` (a block of `group`) unless that is negative, else from `host_blocks[i]`;
    where both are negative it is zeros. Raises the named errors of `errors` before anything is launched."""
    layout.check_group(group)
    check_range(
        "layer_in_group", layer_in_group, 0, layout.group_layers[group] - 1, f"layers of group {group}"
    )
    check_shape("blocks", blocks, (None,))
    num_staged = blocks.shape[0]
    _check_list(num_staged, blocks=blocks, host_blocks=host_blocks)
    check_shape("staged", staged, (None, layout.row_bytes))
    check_dtype("staged", staged, torch.uint8)
    check_contiguous("staged", staged)
    check_range(
        "rows of staged", staged.shape[0], num_staged * layout.page_rows, 2**31 - 1, f"{num_staged} pages"
    )
    if staged.data_ptr() % CHUNK_BYTES:
        raise StrideError(f"staged starts at {staged.data_ptr():#x}; it must be {CHUNK_BYTES}-byte aligned")
    check_same_device(pool=pool, blocks=blocks, host_blocks=host_blocks, staged=staged)
    check_range("num_programs", num_programs, 1, 65535, "a small fixed grid")
    host_words, pool_words = host_argument(host, pool, layout), pool_argument(pool, layout)
    if num_staged == 0:
        return
    config = config or find_config("pages", "stage_pages", "default", arch_of(pool.device))
    stage_pages_kernel[(num_programs,)](
        host_words, pool_words, blocks, host_blocks, staged.view(torch.int32),
        layout.block_bytes, layout.host_block_bytes, layout.first_layers[group] + layer_in_group,
        layer_in_group,
        num_staged, PAGE_BYTES=layout.page_bytes, **config.launch_arguments(),
    )  # fmt: skip


def _aot_cases() -> tuple[AotCase, ...]:
    cases: list[AotCase] = []
    aligned = frozenset({"host_ptr", "block_bytes", "host_block_bytes"})
    for row_bytes in (656, 1152):
        page = {"PAGE_BYTES": 64 * row_bytes}
        for host, host_type in (("tensor", "*i32"), ("address", "i64")):
            types = {"host_ptr": host_type}
            cases.extend(
                AotCase(
                    "copy_pages", "default", copy_pages_kernel, integer_types(copy_pages_kernel, types),
                    page | {"MAX_LAYERS": 4, "TO_HOST": to_host},
                    divisible_by_16=aligned,
                    shape=f"{row_bytes}B_{'to_host' if to_host else 'to_gpu'}_{host}",
                )
                for to_host in (True, False)
            )  # fmt: skip
            cases.append(
                AotCase(
                    "stage_pages", "default", stage_pages_kernel, integer_types(stage_pages_kernel, types),
                    page,
                    divisible_by_16=aligned, shape=f"{row_bytes}B_{host}",
                )
            )  # fmt: skip
    return tuple(cases)


AOT_CASES = _aot_cases()
