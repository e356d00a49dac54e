"""Row writes and reads: a decode step's tokens and a prefill chunk's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hisparsim_kernels.references import rows as reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.row_format import LATENT_COLUMNS, ROPE_COLUMNS, ROW_COLUMNS, RowFormat
from hisparsim_kernels.rows import read_rows, write_rows


def prepare_write(device: torch.device, row_format: RowFormat, tokens: int) -> BenchRun:
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


def prepare_read(device: torch.device, row_format: RowFormat, tokens: int) -> BenchRun:
    """Scattered rows of random tokens, dequantised."""
    generator = torch.Generator(device=device).manual_seed(2)
    latent = torch.randn(4 * tokens, LATENT_COLUMNS, device=device, generator=generator)
    rope = torch.randn(4 * tokens, ROPE_COLUMNS, device=device, generator=generator)
    pool = reference.pack(latent, rope, row_format)
    slots = torch.randperm(4 * tokens, device=device, generator=generator)[:tokens].int()
    out = torch.empty(tokens, ROW_COLUMNS, dtype=torch.bfloat16, device=device)
    return BenchRun(
        run=lambda: read_rows(pool, slots, out),
        reference=lambda: reference.read_rows(pool, slots),
        moved_bytes=tokens * (row_format.row_bytes + 1152),
        torch_op=(lambda: torch.index_select(pool, 0, slots, out=out))
        if row_format is RowFormat.BF16
        else None,
    )


def _case(
    kernel: str,
    prepare: Callable[[torch.device, RowFormat, int], BenchRun],
    row_format: RowFormat,
    tokens: int,
) -> BenchCase:
    return BenchCase(
        kernel,
        f"{row_format.value} {tokens} tokens",
        Roof.HBM,
        lambda device: prepare(device, row_format, tokens),
        tiny=tokens <= 256,
    )


BENCH_CASES = tuple(
    _case(kernel, prepare, row_format, tokens)
    for kernel, prepare in (("write_rows", prepare_write), ("read_rows", prepare_read))
    for row_format in RowFormat
    for tokens in (256, 32768)
)
