# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Mirror of new rows from the GPU pool to the host pool: 16-byte stores over the bus.

    pool       [num_blocks, block_bytes]            uint8
    host       [num_host_blocks, host_block_bytes]  uint8, pinned; or an int64 address (see `host_pool`)
    pool_rows  [capacity]                           int32, flat rows of the pool; -1 skips the entry
    host_rows  [capacity]                           int32, host block * page_rows + row; -1 skips the entry
    num_rows   [1]                                  int32, entries in use

Bytes lie as `page_layout` says. `num_layers` consecutive layers of a group are mirrored in one launch. Writes
over PCIe are posted, so few programs saturate the link; the grid is fixed. The launch belongs inside a
captured step: a host copy made by Python around the graph is not replayed, and a later gather would read rows
that were never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels import errors
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import find_config
from hisparsim_kernels.host_pool import HostPool, host_argument, pool_argument
from hisparsim_kernels.page_layout import CHUNK_BYTES, PageLayout
from hisparsim_kernels.registry import AotCase

NUM_PROGRAMS = 32


@triton.jit(do_not_specialize=["first_host_layer", "first_pool_layer", "capacity"])
def _mirror_kernel(
    pool_ptr,  # int32 words
    host_ptr,  # int32 words, or an address
    pool_rows_ptr,
    host_rows_ptr,
    num_rows_ptr,
    first_pool_layer,
    first_host_layer,
    capacity,
    HOST_BLOCK_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    ROW_CHUNKS: tl.constexpr = ROW_BYTES // 16
    host = tl.multiple_of(host_ptr.to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, 4)[None, :]
    total = tl.minimum(tl.load(num_rows_ptr), capacity) * (NUM_LAYERS * ROW_CHUNKS)
    for start in range(tl.program_id(0) * CHUNKS, total, tl.num_programs(0) * CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        line = chunk // ROW_CHUNKS  # one row of one layer
        entry = line // NUM_LAYERS
        layer = line % NUM_LAYERS
        pool_row = tl.load(pool_rows_ptr + entry, mask=chunk < total, other=-1).to(tl.int64)
        host_row = tl.load(host_rows_ptr + entry, mask=chunk < total, other=-1).to(tl.int64)
        live = ((pool_row >= 0) & (host_row >= 0))[:, None]
        within = chunk % ROW_CHUNKS * 4
        source = (pool_row + (first_pool_layer + layer) * PAGE) * (ROW_BYTES // 4) + within
        target = host_row // PAGE * (HOST_BLOCK_BYTES // 4) + within
        target += ((first_host_layer + layer) * PAGE + host_row % PAGE) * (ROW_BYTES // 4)
        source = tl.multiple_of(source, 4)
        target = tl.multiple_of(target, 4)
        data = tl.load(pool_ptr + source[:, None] + words, mask=live, other=0)
        tl.store(host + target[:, None] + words, data, mask=live, cache_modifier=".cg")


def mirror_rows(
    pool: torch.Tensor,
    host: HostPool,
    pool_rows: torch.Tensor,
    host_rows: torch.Tensor,
    num_rows: torch.Tensor,
    layout: PageLayout,
    *,
    group: int,
    first_layer: int = 0,
    num_layers: int | None = None,
) -> None:
    """Enqueue the copy of the named rows, for `num_layers` layers of the group (all from `first_layer` on by
    default).

    Host rows must not repeat among the entries in use. Raises a `KernelInputError` before anything is
    enqueued.
    """
    layout.check_group(group)
    group_layers = layout.group_layers[group]
    errors.check_range(
        "first_layer", first_layer, 0, group_layers - 1, f"group {group} has {group_layers} layers"
    )
    count = group_layers - first_layer if num_layers is None else num_layers
    errors.check_range(
        "num_layers", count, 1, group_layers - first_layer, f"group {group} has {group_layers} layers"
    )
    errors.check_shape("pool_rows", pool_rows, (None,))
    capacity = pool_rows.shape[0]
    for name, tensor, shape in (
        ("pool_rows", pool_rows, (capacity,)),
        ("host_rows", host_rows, (capacity,)),
        ("num_rows", num_rows, (1,)),
    ):
        errors.check_dtype(name, tensor, torch.int32)
        errors.check_shape(name, tensor, shape)
        errors.check_contiguous(name, tensor)
    device = errors.check_same_device(pool=pool, pool_rows=pool_rows, host_rows=host_rows, num_rows=num_rows)
    host_words, pool_words = host_argument(host, pool, layout), pool_argument(pool, layout)
    chunks = capacity * count * (layout.row_bytes // CHUNK_BYTES)
    errors.check_range("16-byte chunks of a full list", chunks, 0, 2**30, "mirror fewer layers in one launch")
    if capacity == 0:
        return
    config = find_config("mirror", "mirror_rows", "default", arch_of(device))
    grid = (min(NUM_PROGRAMS, triton.cdiv(chunks, config.meta["CHUNKS"])),)
    _mirror_kernel[grid](
        pool_words,
        host_words,
        pool_rows,
        host_rows,
        num_rows,
        first_layer,
        layout.first_layers[group] + first_layer,
        capacity,
        HOST_BLOCK_BYTES=layout.host_block_bytes,
        ROW_BYTES=layout.row_bytes,
        NUM_LAYERS=count,
        PAGE=layout.page_rows,
        **config.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    types = dict.fromkeys(_mirror_kernel.arg_names[:5], "*i32") | dict.fromkeys(
        _mirror_kernel.arg_names[5:8], "i32"
    )
    return tuple(
        AotCase(
            "mirror_rows",
            "default",
            _mirror_kernel,
            types | {"host_ptr": host_type},
            {"ROW_BYTES": row_bytes, "NUM_LAYERS": 4, "PAGE": 64, "HOST_BLOCK_BYTES": 3276800},
            divisible_by_16=frozenset({"host_ptr"}),
            shape=f"{row_bytes} B {host_type}",
        )
        for row_bytes in (656, 1152)
        for host_type in ("*i32", "i64")
    )


AOT_CASES = _aot_cases()
