"""Seeded random inputs that several benchmarks and the device checks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsim_kernels.row_format import LATENT_COLUMNS, ROPE_COLUMNS, ROW_COLUMNS, RowFormat
from hisparsim_kernels.rows import write_rows

TOP_K = 2048


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of sparse MLA, decode or prefill."""

    q: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def attention_inputs(
    device: torch.device,
    row_format: RowFormat,
    tokens: int,
    heads: int,
    *,
    top_k: int = TOP_K,
    num_rows: int | None = None,
    seed: int = 0,
) -> AttentionInputs:
    """Random queries and distinct random rows a token, in a pool of four times the rows read, 1 M at most."""
    generator = torch.Generator(device=device).manual_seed(seed)
    count = num_rows or min(1 << 20, max(4 * top_k, 4 * tokens * top_k))
    rows = row_format.empty_pool(count, device)
    for first in range(0, count, 1 << 16):
        part = slice(first, min(count, first + (1 << 16)))
        size = part.stop - part.start
        latent = torch.randn(size, LATENT_COLUMNS, generator=generator, device=device).bfloat16() / 2
        rope = torch.randn(size, ROPE_COLUMNS, generator=generator, device=device).bfloat16()
        if device.type == "cuda":
            place = torch.arange(part.start, part.stop, dtype=torch.int32, device=device)
            write_rows(latent, rope, place, rows, power_of_two_scales=True)
        else:
            from hisparsim_kernels.references.rows import pack

            rows[part] = pack(latent, rope, row_format, power_of_two_scales=True)
    q = torch.randn(tokens, heads, ROW_COLUMNS, generator=generator, device=device).bfloat16() / 2
    slots = torch.stack(
        [torch.randperm(count, generator=generator, device=device)[:top_k].int() for _ in range(tokens)]
    )
    return AttentionInputs(
        q=q,
        rows=rows,
        slots=slots,
        counts=torch.full((tokens,), top_k, dtype=torch.int32, device=device),
        out=torch.empty(tokens, heads, LATENT_COLUMNS, dtype=torch.bfloat16, device=device),
        lse=torch.empty(tokens, heads, dtype=torch.float32, device=device),
    )


def attention_bytes(row_format: RowFormat, tokens: int, heads: int, top_k: int) -> int:
    """Fewest bytes of sparse MLA: rows and slots once a token, queries in, outputs out."""
    return tokens * (top_k * (row_format.row_bytes + 4) + heads * 2 * (ROW_COLUMNS + LATENT_COLUMNS))


def attention_flops(tokens: int, heads: int, top_k: int) -> int:
    """Two products: 576 columns for scores, 512 for the output; multiply and add count as two."""
    return 2 * tokens * heads * top_k * (ROW_COLUMNS + LATENT_COLUMNS)
