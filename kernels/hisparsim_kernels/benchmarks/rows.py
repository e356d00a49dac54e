"""Row writes: a decode step's tokens and a prefill chunk's."""

from __future__ import annotations

import torch

from hisparsim_kernels.references import rows as reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.row_format import LATENT_COLUMNS, ROPE_COLUMNS, RowFormat
from hisparsim_kernels.rows import write_rows


def prepare(device: torch.device, row_format: RowFormat, tokens: int) -> BenchRun:
    """Random tokens into scattered rows."""
    generator = torch.Generator(device=device).manual_seed(1)
    latent = torch.randn(tokens, LATENT_COLUMNS, device=device, generator=generator).bfloat16()
    rope = torch.randn(tokens, ROPE_COLUMNS, device=device, generator=generator).bfloat16()
    pool = row_format.empty_pool(4 * tokens, device)
    slots = torch.randperm(4 * tokens, device=device, generator=generator)[:tokens].int()
    return BenchRun(
        run=lambda: write_rows(latent, rope, slots, pool),
        reference=lambda: reference.write_rows(latent, rope, slots, pool),
        moved_bytes=tokens * (1152 + row_format.row_bytes),
    )


def _case(row_format: RowFormat, tokens: int) -> BenchCase:
    return BenchCase(
        "write_rows",
        f"{row_format.value} {tokens} tokens",
        Roof.HBM,
        lambda device: prepare(device, row_format, tokens),
        tiny=tokens <= 256,
    )


BENCH_CASES = tuple(_case(row_format, tokens) for row_format in RowFormat for tokens in (256, 32768))
