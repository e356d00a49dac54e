"""Reference of the grouped expert GEMM, with the block scales applied in float64, and a quantiser for
tests."""

from __future__ import annotations

import torch

TILE = 128


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] -> e4m3 [rows, K] and scales [rows, K / 128] float32."""
    tiles = x.float().reshape(x.shape[0], -1, TILE)
    scale = tiles.abs().amax(-1).clamp_min(1e-4) / 448
    return (tiles / scale[..., None]).to(torch.float8_e4m3fn).reshape(x.shape), scale


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [experts, N, K] -> e4m3 of that shape and scales [experts, ceil(N / 128), K / 128] float32."""
    experts, n, k = weight.shape
    scale = torch.empty(experts, -(-n // TILE), k // TILE)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[1]):
        for j in range(scale.shape[2]):
            part = (slice(None), slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE))
            scale[:, i, j] = weight[part].float().abs().amax((1, 2)).clamp_min(1e-4) / 448
            codes[part] = (weight[part].float() / scale[:, i, j, None, None]).to(torch.float8_e4m3fn)
    return codes, scale


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [rows, N] float64; rows past the last group are 0."""
    wide_x = x.float().double()
    if x_scale is not None:
        wide_x = wide_x * x_scale.double().repeat_interleave(TILE, 1)
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    bounds = offsets.tolist()
    for expert in range(weight.shape[0]):
        wide_w = weight[expert].float().double()
        if w_scale is not None:
            scale = w_scale[expert].double().repeat_interleave(TILE, 0)[: weight.shape[1]]
            wide_w = wide_w * scale.repeat_interleave(TILE, 1)
        part = slice(bounds[expert], bounds[expert + 1])
        out[part] = wide_x[part] @ wide_w.T
    return out
