# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Grouped expert GEMM: out[r] = x[r] @ weight[e(r)]^T, rows sorted by expert, group offsets on the device.

    x         [rows, K]              bf16, or e4m3 with x_scale; sorted by expert
    weight    [experts, N, K]        the type of x, contiguous
    offsets   [experts + 1]          int32, from 0: expert e owns rows offsets[e] to offsets[e + 1]; groups
                                     may be empty; rows from offsets[experts] on are padding, their output is
                                     0
    x_scale   [rows, K / 128]        float32, one for each 128 columns of a row (e4m3 only)
    w_scale   [experts, ceil(N / 128), K / 128]   float32, one for each 128 x 128 tile (e4m3 only)
    out       [rows, N]              bf16 or float32; all of it is written

The grid is fixed by `rows` and `experts`: each program finds its expert by a prefix sum over the groups' tile
counts, so nothing waits for the host. Weights are the left operand: a decode step has few rows an expert, and
128 columns of N fill the tensor cores however few they are. A row's sum runs over K in a fixed order whatever
group or tile it is in, so under one configuration (`invariant_config`) results do not depend on the batch.

torch has a grouped product for bf16 and for row-wise fp8 scales, none for the 128 x 128 block scales that
DeepSeek-V3 and GLM-5 checkpoints carry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels import errors
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.registry import AotCase

SCALE_TILE = 128
MAX_EXPERTS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    group = tl.arange(0, BLOCK_EXPERTS)
    begin = tl.load(offsets_ptr + group, mask=group < EXPERTS, other=0)
    end = tl.load(offsets_ptr + group + 1, mask=group < EXPERTS, other=0)
    # Offsets that are no offsets (negative, past the rows, descending) must not lead out of the buffers.
    begin = tl.minimum(tl.maximum(begin, 0), num_rows)
    end = tl.minimum(tl.maximum(end, begin), num_rows)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = tl.sum(tl.where(group < expert, tiles, 0), 0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if expert >= EXPERTS:
        # Past the last group: tiles of padding rows, whose output is zero.
        used = tl.minimum(tl.maximum(tl.load(offsets_ptr + EXPERTS), 0), num_rows)
        row = used + (tile - earlier) * BLOCK_M + tl.arange(0, BLOCK_M)
        blank_at = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
        inside = (row < num_rows)[:, None] & (column < N)[None, :]
        tl.store(blank_at, tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty), mask=inside)
        return
    row = tl.maximum(tl.load(offsets_ptr + expert), 0) + (tile - earlier) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < tl.minimum(tl.load(offsets_ptr + expert + 1), num_rows)
    row = row.to(tl.int64)
    expert = expert.to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    w_at = weight_ptr + (expert * N + column)[:, None] * K + depth[None, :]
    x_at = x_ptr + row[:, None] * K + depth[None, :]
    K_TILES: tl.constexpr = K // 128
    N_TILES: tl.constexpr = (N + 127) // 128
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K // BLOCK_K):
        w = tl.load(w_at + k * BLOCK_K, mask=(column < N)[:, None], other=0.0)
        x = tl.load(x_at + k * BLOCK_K, mask=live[:, None], other=0.0)
        if FP8:
            # BLOCK_K and BLOCK_N are the 128 of a scale tile.
            x_scale = tl.load(x_scale_ptr + row * K_TILES + k, mask=live, other=0.0)
            w_scale = tl.load(w_scale_ptr + (expert * N_TILES + tl.program_id(1)) * K_TILES + k)
            total += tl.dot(w, tl.trans(x)) * (x_scale * w_scale)[None, :]
        else:
            total = tl.dot(w, tl.trans(x), total)
    out_at = out_ptr + row[None, :] * N + column[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=live[None, :] & (column < N)[:, None])


def gemm_config(fp8: bool, rows: int, experts: int, arch: str) -> LaunchConfig:
    """The default configuration, by the mean number of rows an expert: 16, 64 or 128 rows a tile."""
    mean = rows / max(1, experts)
    size = "m16" if mean <= 16 else "m64" if mean <= 64 else "m128"
    return find_config("grouped_gemm", "grouped_gemm", f"{'fp8' if fp8 else 'bf16'}-{size}", arch)


def invariant_config(fp8: bool, arch: str) -> LaunchConfig:
    """The one configuration of batch-invariant runs, whatever the number of rows."""
    return find_config("grouped_gemm", "grouped_gemm", f"{'fp8' if fp8 else 'bf16'}-m64", arch)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """Enqueue the product of every group; shapes stand in the module. Raises a `KernelInputError` before
    that.
    """
    errors.check_dtype("x", x, torch.bfloat16, torch.float8_e4m3fn)
    fp8 = x.dtype == torch.float8_e4m3fn
    errors.check_dtype("weight", weight, x.dtype)
    errors.check_shape("weight", weight, (None, None, None))
    experts, n, k = weight.shape
    errors.check_range("experts", experts, 1, MAX_EXPERTS, "a program holds all group offsets at once")
    errors.check_shape("x", x, (None, k))
    rows = x.shape[0]
    if k % SCALE_TILE or n % 16:
        raise errors.ShapeError(
            f"weight has shape {tuple(weight.shape)}; K must be a multiple of 128 and N of 16"
        )
    errors.check_dtype("offsets", offsets, torch.int32)
    errors.check_shape("offsets", offsets, (experts + 1,))
    errors.check_dtype("out", out, torch.bfloat16, torch.float32)
    errors.check_shape("out", out, (rows, n))
    tensors = {"x": x, "weight": weight, "offsets": offsets, "out": out}
    if (x_scale is None or w_scale is None) == fp8 or (x_scale is None) != (w_scale is None):
        raise errors.DtypeError(f"x has dtype {x.dtype}; e4m3 needs x_scale and w_scale, bf16 takes neither")
    if x_scale is not None and w_scale is not None:
        for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
            errors.check_dtype(name, scale, torch.float32)
        errors.check_shape("x_scale", x_scale, (rows, k // SCALE_TILE))
        errors.check_shape("w_scale", w_scale, (experts, -(-n // SCALE_TILE), k // SCALE_TILE))
        tensors |= {"x_scale": x_scale, "w_scale": w_scale}
    for name, tensor in tensors.items():
        errors.check_contiguous(name, tensor)
    device = errors.check_same_device(**tensors)
    if rows == 0:
        return
    if config is None:
        config = gemm_config(fp8, rows, experts, arch_of(device))
    # Each group wastes less than a tile, and so do the padding rows.
    most_tiles = rows // config.meta["BLOCK_M"] + min(experts, rows) + 1
    _grouped_kernel[(most_tiles, triton.cdiv(n, config.meta["BLOCK_N"]))](
        x,
        weight,
        offsets,
        x_scale,
        w_scale,
        out,
        rows,
        N=n,
        K=k,
        EXPERTS=experts,
        BLOCK_EXPERTS=triton.next_power_of_2(experts),
        FP8=fp8,
        **config.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    cases = []
    for fp8 in (False, True):
        element = "*fp8e4nv" if fp8 else "*bf16"
        types = {"x_ptr": element, "weight_ptr": element, "offsets_ptr": "*i32", "out_ptr": "*bf16"}
        types["num_rows"] = "i32"
        none: dict[str, int | bool | None] = {} if fp8 else {"x_scale_ptr": None, "w_scale_ptr": None}
        if fp8:
            types |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
        for size in ("m16", "m64", "m128"):
            constants: dict[str, int | bool | None] = {}
            constants |= {"N": 4096, "K": 6144, "EXPERTS": 256, "BLOCK_EXPERTS": 256, "FP8": fp8}
            config = f"{'fp8' if fp8 else 'bf16'}-{size}"
            cases.append(AotCase("grouped_gemm", config, _grouped_kernel, types, constants | none))
    return tuple(cases)


AOT_CASES = _aot_cases()
