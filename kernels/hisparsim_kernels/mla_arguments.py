"""The arguments that sparse MLA decode and prefill share, checked before a launch."""

from __future__ import annotations

import math
import numbers

import torch

from hisparsim_kernels import errors
from hisparsim_kernels.mla_tile import LATENT, WIDTH
from hisparsim_kernels.row_format import RowFormat, row_format_of

MAX_HEADS = 128


def head_block(heads: int) -> int:
    """Heads of one program by default: 16, 32, or 64 where that leaves none empty."""
    return 16 if heads <= 16 else 64 if heads % 64 == 0 else 32


def check_attention_arguments(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[RowFormat, torch.device]:
    """The row format and the common device of an attention call; a `KernelInputError` for what breaks its
    contract.
    """
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise errors.RangeError(f"scale is {scale!r}; it must be a finite number (on the host, no tensor)")
    row_format = row_format_of(rows)
    errors.check_dtype("q", q, torch.bfloat16)
    errors.check_shape("q", q, (None, None, WIDTH.value))
    tokens, heads, _ = q.shape
    errors.check_range("heads", heads, 1, MAX_HEADS, "sparse MLA kernels serve up to 128 heads")
    errors.check_dtype("slots", slots, torch.int32)
    errors.check_shape("slots", slots, (tokens, None))
    errors.check_dtype("counts", counts, torch.int32)
    errors.check_shape("counts", counts, (tokens,))
    errors.check_dtype("out", out, torch.bfloat16, torch.float32)
    errors.check_shape("out", out, (tokens, heads, LATENT.value))
    errors.check_dtype("lse", lse, torch.float32)
    errors.check_shape("lse", lse, (tokens, heads))
    for name, tensor in {"q": q, "slots": slots, "counts": counts, "out": out, "lse": lse}.items():
        errors.check_contiguous(name, tensor)
    device = errors.check_same_device(q=q, rows=rows, slots=slots, counts=counts, out=out, lse=lse)
    return row_format, device
