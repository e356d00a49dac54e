"""Sparse MLA prefill: chunks of tokens that each read 2,048 rows."""

from __future__ import annotations

import torch

from hisparsim_kernels.benchmarks.inputs import TOP_K, attention_bytes, attention_flops, attention_inputs
from hisparsim_kernels.benchmarks.mla_decode import SCALE, torch_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.row_format import RowFormat


def prepare(device: torch.device, row_format: RowFormat, tokens: int, heads: int) -> BenchRun:
    """Inputs and calls of one size; the pool is a context of 131,072 rows."""
    from hisparsim_kernels.references.mla import sparse_mla

    top_k = TOP_K if tokens > 16 else 256
    num_rows = 131072 if tokens > 16 else 4096
    inputs = attention_inputs(device, row_format, tokens, heads, top_k=top_k, num_rows=num_rows)

    def run() -> None:
        sparse_mla_prefill(
            inputs.q, inputs.rows, inputs.slots, inputs.counts, scale=SCALE, out=inputs.out, lse=inputs.lse
        )

    def reference() -> None:
        sparse_mla(inputs.q, inputs.rows, inputs.slots, inputs.counts, SCALE)

    return BenchRun(
        run=run,
        reference=reference,
        moved_bytes=attention_bytes(row_format, tokens, heads, top_k),
        flops=attention_flops(tokens, heads, top_k),
        torch_op=(lambda: torch_decode(inputs)) if row_format is RowFormat.BF16 else None,
    )


def _case(row_format: RowFormat, tokens: int, heads: int) -> BenchCase:
    return BenchCase(
        "mla_prefill",
        f"{row_format.value} {tokens} tokens {heads} heads",
        Roof.TENSOR_BF16,
        lambda device: prepare(device, row_format, tokens, heads),
        tiny=tokens <= 16,
    )


BENCH_CASES = tuple(
    _case(row_format, tokens, heads)
    for row_format in RowFormat
    for tokens, heads in ((16, 16), (1024, 16), (1024, 64), (1024, 128))
)
