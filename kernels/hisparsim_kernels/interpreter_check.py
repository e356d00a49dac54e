# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Self-test of the corrected interpreter: bf16 and fp8 against torch, bit for bit where a rounding is
defined.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from hisparsim_kernels.errors import InterpreterMismatchError


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _cast_kernel(in_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(in_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, sum_ptr, count_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    tl.store(out_ptr + at, a * b + 1.5 - a)
    tl.store(sum_ptr, tl.sum(a))
    total = 0
    for _ in range(0, tl.load(count_ptr)):
        total += 1
    tl.store(count_ptr, total * 2)


def _require(name: str, ok: bool, detail: str) -> None:
    if not ok:
        raise InterpreterMismatchError(
            f"the interpreter of triton {triton.__version__} (numpy {np.__version__}) fails the check "
            f"'{name}': {detail}; its internals changed, or the correction no longer fits"
        )


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    both_nan = got.isnan() & want.isnan()
    return bool(torch.equal(got.float()[~both_nan], want.float()[~both_nan]))


def self_test() -> None:
    """Run every check; raise `InterpreterMismatchError` naming the first that fails. Takes about 50 ms."""
    generator = torch.Generator().manual_seed(20)
    n = 32
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        a = torch.randn(n, n, generator=generator).to(dtype)
        b = torch.randn(n, n, generator=generator).to(dtype)
        out = torch.full((n, n), float("nan"))
        _dot_kernel[(1,)](a, b, out, N=n)
        error = (out.double() - a.double() @ b.double()).abs().max().item()
        _require(f"dot of {dtype}", error < 1e-4, f"largest error {error}")

    wide = torch.randn(4096, generator=generator) * torch.exp2(
        torch.randint(-12, 8, (4096,), generator=generator)
    )
    wide[:8] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 3.0e38])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cast = torch.empty(4096, dtype=dtype)
        _cast_kernel[(1,)](wide, cast, N=4096)
        want = (wide.clamp(-448, 448) if dtype != torch.bfloat16 else wide).to(dtype)
        wrong = int((cast.view(torch.uint8) != want.view(torch.uint8)).sum())
        _require(f"cast to {dtype}", wrong == 0, f"{wrong} bytes differ from round-to-nearest-even")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.empty(256)
    _cast_kernel[(1,)](codes, values, N=256)
    _require("cast from e4m3", _same_bits(values, codes.float()), "decoded values differ from torch")

    a, b = (torch.randn(256, generator=generator).bfloat16() for _ in range(2))
    out, total = torch.empty(256, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)
    count = torch.tensor([3], dtype=torch.int32)
    _arithmetic_kernel[(1,)](a, b, out, total, count, N=256)
    want = ((a * b) + 1.5) - a
    _require(
        "bf16 arithmetic", torch.allclose(out.float(), want.float(), rtol=2**-7, atol=2**-7), "values differ"
    )
    drift = abs(total.item() - a.double().sum().item())
    _require("bf16 sum", drift < 0.1, f"sum off by {drift}")
    _require("loop over a loaded bound", count.item() == 6, f"{count.item()} instead of 6")
