"""References of the row formats: pack, unpack, write, read. Rounding follows the format, the rest float64."""

from __future__ import annotations

import torch

from hisparsim_kernels.row_format import (
    E4M3_MAX,
    LATENT_COLUMNS,
    ROPE_COLUMNS,
    SCALE_TILE,
    SMALLEST_AMAX,
    RowFormat,
    row_format_of,
)

SCALES_AT = LATENT_COLUMNS
ROPE_AT = LATENT_COLUMNS + 4 * (LATENT_COLUMNS // SCALE_TILE)


def tile_scales(latent: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """latent [n, 512] -> scales [n, 4] float32: the largest magnitude of each 128 columns / 448."""
    tiles = latent.float().reshape(-1, LATENT_COLUMNS // SCALE_TILE, SCALE_TILE)
    scale = tiles.abs().amax(-1).clamp_min(SMALLEST_AMAX) / E4M3_MAX
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float() if power_of_two else scale


def pack(
    latent: torch.Tensor, rope: torch.Tensor, row_format: RowFormat, power_of_two_scales: bool = False
) -> torch.Tensor:
    """latent [n, 512], rope [n, 64] -> rows [n, 576] bf16 or [n, 656] uint8."""
    if row_format is RowFormat.BF16:
        return torch.cat([latent.bfloat16(), rope.bfloat16()], -1)
    scale = tile_scales(latent, power_of_two_scales)
    tiles = latent.float().reshape(-1, LATENT_COLUMNS // SCALE_TILE, SCALE_TILE) / scale[:, :, None]
    codes = tiles.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).reshape(-1, LATENT_COLUMNS)
    parts = [codes.view(torch.uint8), scale.contiguous().view(torch.uint8), rope.bfloat16().view(torch.uint8)]
    return torch.cat(parts, -1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, ...] of either format -> values [n, 576] float64, exactly what the bytes say."""
    if row_format_of(rows) is RowFormat.BF16:
        return rows.double()
    codes = rows[:, :SCALES_AT].contiguous().view(torch.float8_e4m3fn).float().double()
    scale = rows[:, SCALES_AT:ROPE_AT].contiguous().view(torch.float32).double()
    rope = rows[:, ROPE_AT : ROPE_AT + 2 * ROPE_COLUMNS].contiguous().view(torch.bfloat16).double()
    return torch.cat([codes * scale.repeat_interleave(SCALE_TILE, 1), rope], -1)


def write_rows(
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    power_of_two_scales: bool = False,
) -> None:
    """Write packed tokens to `rows[slots]` in place; -1 writes nothing."""
    keep = slots >= 0
    packed = pack(latent[keep], rope[keep], row_format_of(rows), power_of_two_scales)
    rows[slots[keep].long()] = packed


def read_rows(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`rows[slots]` as [tokens, 576] float64; zeros for -1."""
    out = torch.zeros(len(slots), LATENT_COLUMNS + ROPE_COLUMNS, dtype=torch.float64)
    keep = slots >= 0
    out[keep] = unpack(rows[slots[keep].long()])
    return out
