"""One loud comparison for attention results: the tolerances that upstream uses, and what was off."""

from __future__ import annotations

import torch


def assert_attention_close(
    out: torch.Tensor, lse: torch.Tensor, want_out: torch.Tensor, want_lse: torch.Tensor
) -> None:
    """FlashMLA's tolerances: out abs 1e-3 + rel 2.01/128 and cosine difference 5e-6; lse abs 1e-6 + rel
    8.01/65536. Infinities must stand at the same places."""
    out, want_out = out.double(), want_out.double()
    assert bool(out.isfinite().all()), f"{int((~out.isfinite()).sum())} values of out are not finite"
    error = (out - want_out).abs()
    allowed = 1e-3 + 2.01 / 128 * want_out.abs()
    worst = (error - allowed).max().item()
    assert worst <= 0, f"out is off by {error.max().item():.3e} (past the tolerance by {worst:.3e})"
    norm = (out * out + want_out * want_out).sum().item()
    if norm > 0:
        cosine = 1 - 2 * (out * want_out).sum().item() / norm
        assert cosine < 5e-6, f"cosine difference {cosine:.2e}"
    lse, want_lse = lse.double(), want_lse.double()
    infinite = want_lse.isinf()
    assert torch.equal(lse.isinf(), infinite) and torch.equal(lse[infinite], want_lse[infinite])
    lse_error = (lse - want_lse)[~infinite].abs() - (1e-6 + 8.01 / 65536 * want_lse[~infinite].abs())
    worst = lse_error.max().item() if lse_error.numel() else 0.0
    assert worst <= 0, f"lse is past the tolerance by {worst:.2e}"
