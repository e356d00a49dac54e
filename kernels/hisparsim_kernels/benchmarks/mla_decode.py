"""Sparse MLA decode: requests, heads a GPU and row formats; the published comparison is 8 requests of 16
heads.
"""

from __future__ import annotations

import math

import torch

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.benchmarks.inputs import (
    TOP_K,
    AttentionInputs,
    attention_bytes,
    attention_flops,
    attention_inputs,
)
from hisparsim_kernels.mla_decode import DecodeScratch, decode_config, plan_splits, sparse_mla_decode
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.row_format import LATENT_COLUMNS, RowFormat

SCALE = 1 / math.sqrt(256)


def torch_decode(inputs: AttentionInputs) -> None:
    """What torch offers for bf16 rows: gather, product, softmax, product."""
    keys = inputs.rows[inputs.slots.long()]
    score = torch.einsum("thd,tkd->thk", inputs.q, keys) * SCALE
    weight = torch.softmax(score.float(), -1).bfloat16()
    torch.matmul(weight, keys[..., :LATENT_COLUMNS], out=inputs.out)


def prepare(
    device: torch.device, row_format: RowFormat, tokens: int, heads: int, top_k: int = TOP_K
) -> BenchRun:
    """Inputs and calls of one size."""
    from hisparsim_kernels.references.mla import sparse_mla

    inputs = attention_inputs(device, row_format, tokens, heads, top_k=top_k)
    splits = plan_splits(tokens, heads, top_k, decode_config(row_format, heads, arch_of(device)))
    scratch = DecodeScratch.create(tokens, heads, splits, device)

    def run() -> None:
        sparse_mla_decode(
            inputs.q,
            inputs.rows,
            inputs.slots,
            inputs.counts,
            scale=SCALE,
            out=inputs.out,
            lse=inputs.lse,
            scratch=scratch,
            num_splits=splits,
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
        "mla_decode",
        f"{row_format.value} {tokens} tokens {heads} heads",
        Roof.HBM,
        lambda device: prepare(device, row_format, tokens, heads),
        tiny=tokens == 1 and heads <= 16,
    )


BENCH_CASES = tuple(
    _case(row_format, tokens, heads)
    for row_format in RowFormat
    for tokens, heads in ((1, 16), (8, 8), (8, 16), (8, 64), (64, 16), (64, 64), (256, 16), (128, 128))
)
