"""Grouped expert GEMM: GLM-5's 256 experts of 6144 x (2 x 2048), top-8, balanced routing."""

from __future__ import annotations

import torch

from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof


def prepare(device: torch.device, fp8: bool, rows: int, experts: int, n: int, k: int) -> BenchRun:
    """Rows drawn uniformly over experts and sorted; the offsets are on the device."""
    from hisparsim_kernels.references.grouped_gemm import grouped_gemm as reference

    generator = torch.Generator(device=device).manual_seed(3)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    chosen = torch.randint(experts, (rows,), generator=generator, device=device)
    sizes = torch.bincount(chosen, minlength=experts)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    offsets[1:] = sizes.cumsum(0)
    x = torch.randn(rows, k, generator=generator, device=device).to(dtype)
    weight = torch.empty(experts, n, k, dtype=dtype, device=device)
    for expert in range(experts):
        weight[expert] = torch.randn(n, k, generator=generator, device=device).to(dtype)
    x_scale = torch.rand(rows, k // 128, generator=generator, device=device) if fp8 else None
    w_scale = torch.rand(experts, -(-n // 128), k // 128, generator=generator, device=device) if fp8 else None
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    used = int((sizes > 0).sum())
    ends = offsets[1:]
    return BenchRun(
        run=lambda: grouped_gemm(x, weight, offsets, out, x_scale=x_scale, w_scale=w_scale),
        reference=lambda: reference(x, weight, offsets, x_scale, w_scale),
        moved_bytes=(used * n * k + rows * k) * dtype.itemsize + rows * n * 2,
        flops=2 * rows * n * k,
        torch_op=None if fp8 else lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
    )


def _case(fp8: bool, rows: int, experts: int, n: int, k: int) -> BenchCase:
    kind = "fp8" if fp8 else "bf16"
    tensor = Roof.TENSOR_FP8 if fp8 else Roof.TENSOR_BF16
    return BenchCase(
        "grouped_gemm",
        f"{kind} {rows} rows {experts} experts {n} x {k}",
        Roof.HBM if rows // experts <= 64 else tensor,
        lambda device: prepare(device, fp8, rows, experts, n, k),
        tiny=rows <= 64,
    )


BENCH_CASES = tuple(
    _case(fp8, *sizes)
    for fp8 in (False, True)
    for sizes in (
        (64, 8, 256, 512),
        (256, 256, 4096, 6144),
        (2048, 256, 4096, 6144),
        (65536, 256, 4096, 6144),
    )
)
