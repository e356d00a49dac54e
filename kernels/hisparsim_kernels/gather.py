# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Gather of missed rows from host memory into hot rows of the GPU pool: plain 16-byte loads over the bus.

    host             [num_host_blocks, host_block_bytes]  uint8, pinned; or an int64 address (see `host_pool`)
    pool             [num_blocks, block_bytes]            uint8
    miss_host_rows   [max_misses]                         int32, host block * page_rows + row
    miss_hot_rows    [max_misses]                         int32, flat rows of the pool; an entry with a
                                                          negative row of either kind is skipped
    num_misses       [1]                                  int32, entries in use; as in a `ResolvePlan`

Bytes lie as `page_layout` says. `num_layers` consecutive layers of a group are fetched in one launch: the
leader of an index group and its followers share a plan; or one layer at a time, where attention should not
wait for the others.

The work is cut into 16-byte chunks across all rows and layers, so that no lane idles at 656 or 1152 bytes and
a row of 128 bytes is as good as one of 4 KiB. The grid is fixed and small: with a tile of 16 KiB in flight in
each program, 32 programs hold ten times the 45 KB that fill a PCIe 5 link (38 GB/s x 1.2 us of round trip;
published measurements on Hopper), and more programs would only slow down what runs beside the gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels.aot_types import integer_types
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.errors import (
    check_contiguous,
    check_dtype,
    check_range,
    check_same_device,
    check_shape,
)
from hisparsim_kernels.host_pool import HostPool, host_argument, pool_argument
from hisparsim_kernels.page_layout import CHUNK_BYTES, PageLayout
from hisparsim_kernels.registry import AotCase

DEFAULT_PROGRAMS = 32
"""Published measurements of write-back on B200: 32 blocks saturate the link, 16 do not."""


@triton.jit(do_not_specialize=["first_host_layer", "first_pool_layer", "max_misses"])
def gather_rows_kernel(
    host_ptr, pool_ptr, miss_host_rows_ptr, miss_hot_rows_ptr, num_misses_ptr,
    host_block_bytes, first_host_layer, first_pool_layer, max_misses,
    ROW_BYTES: tl.constexpr, NUM_LAYERS: tl.constexpr, PAGE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (a fixed number of programs): tiles of CHUNKS 16-byte chunks, dealt round robin."""
    ROW_CHUNKS: tl.constexpr = ROW_BYTES // 16
    host = tl.multiple_of(host_ptr.to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, 4)
    num_misses = tl.minimum(tl.load(num_misses_ptr), max_misses)
    total = num_misses * (NUM_LAYERS * ROW_CHUNKS)
    for start in range(tl.program_id(0) * CHUNKS, total, tl.num_programs(0) * CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = chunk < total
        line = chunk // ROW_CHUNKS  # one row of one layer
        miss = line // NUM_LAYERS
        layer = line % NUM_LAYERS
        word = (chunk % ROW_CHUNKS) * 4
        host_row = tl.load(miss_host_rows_ptr + miss, mask=inside, other=-1)
        hot_row = tl.load(miss_hot_rows_ptr + miss, mask=inside, other=-1)
        live = (host_row >= 0) & (hot_row >= 0)
        source = (host_row // PAGE).to(tl.int64) * (host_block_bytes // 16) * 4
        source += ((first_host_layer + layer) * PAGE + host_row % PAGE).to(tl.int64) * (ROW_BYTES // 4) + word
        target = (hot_row.to(tl.int64) + (first_pool_layer + layer) * PAGE) * (ROW_BYTES // 4) + word
        source = tl.multiple_of(source, 4)
        target = tl.multiple_of(target, 4)
        mask = live[:, None] & (words[None, :] < 4)
        data = tl.load(host + source[:, None] + words[None, :], mask=mask, other=0, cache_modifier=".cg")
        tl.store(pool_ptr + target[:, None] + words[None, :], data, mask=mask, cache_modifier=".cg")


def gather_config(device: torch.device) -> LaunchConfig:
    """The configuration of `gather_rows` on the device's architecture."""
    return find_config("gather", "gather_rows", "default", arch_of(device))


def gather_rows(
    host: HostPool,
    pool: torch.Tensor,
    miss_host_rows: torch.Tensor,
    miss_hot_rows: torch.Tensor,
    num_misses: torch.Tensor,
    layout: PageLayout,
    *,
    group: int,
    first_layer: int = 0,
    num_layers: int | None = None,
    num_programs: int = DEFAULT_PROGRAMS,
    config: LaunchConfig | None = None,
) -> None:
    """Copy the missed rows of `num_layers` layers (all of the group's by default), from its layer
    `first_layer` on, into the pool: one launch. Host rows must be complete before the launch in stream order.

    Raises `DtypeError`, `ShapeError`, `StrideError`, `DeviceError` or `RangeError` before anything is
    launched."""
    layout.check_group(group)
    group_layers = layout.group_layers[group]
    check_range("first_layer", first_layer, 0, group_layers - 1, f"group {group} has {group_layers} layers")
    count = group_layers - first_layer if num_layers is None else num_layers
    check_range(
        "num_layers", count, 1, group_layers - first_layer, f"group {group} has {group_layers} layers"
    )
    check_range("num_programs", num_programs, 1, 65535, "a small fixed grid")
    check_shape("miss_host_rows", miss_host_rows, (None,))
    for name, tensor in (("miss_host_rows", miss_host_rows), ("miss_hot_rows", miss_hot_rows)):
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, (miss_host_rows.shape[0],))
        check_contiguous(name, tensor)
    check_dtype("num_misses", num_misses, torch.int32)
    check_shape("num_misses", num_misses, (1,))
    check_same_device(
        pool=pool, miss_host_rows=miss_host_rows, miss_hot_rows=miss_hot_rows, num_misses=num_misses
    )
    host_words, pool_words = host_argument(host, pool, layout), pool_argument(pool, layout)
    config = config or gather_config(pool.device)
    max_misses = miss_host_rows.shape[0]
    chunks = max_misses * count * (layout.row_bytes // CHUNK_BYTES) + (num_programs + 1) * int(
        config.meta["CHUNKS"]
    )
    check_range(
        "16-byte chunks of a full miss list", chunks, 0, 2**31 - 1, "fetch fewer layers in one launch"
    )
    if max_misses == 0:
        return
    gather_rows_kernel[(num_programs,)](
        host_words, pool_words, miss_host_rows, miss_hot_rows, num_misses,
        layout.host_block_bytes, layout.first_layers[group] + first_layer, first_layer, max_misses,
        ROW_BYTES=layout.row_bytes, NUM_LAYERS=count, PAGE=layout.page_rows, **config.launch_arguments(),
    )  # fmt: skip


def _aot_cases() -> tuple[AotCase, ...]:
    cases: list[AotCase] = []
    for row_bytes, num_layers in ((128, 1), (656, 1), (656, 4), (1152, 4), (4096, 1)):
        for host, host_type in (("tensor", "*i32"), ("address", "i64")):
            cases.append(
                AotCase(
                    "gather_rows", "default", gather_rows_kernel,
                    integer_types(gather_rows_kernel, {"host_ptr": host_type}),
                    {"ROW_BYTES": row_bytes, "NUM_LAYERS": num_layers, "PAGE": 64},
                    divisible_by_16=frozenset({"host_ptr", "host_block_bytes"}),
                    shape=f"{row_bytes}B_x{num_layers}_{host}",
                )
            )  # fmt: skip
    return tuple(cases)


AOT_CASES = _aot_cases()
