"""Sparse MLA prefill against the float64 reference, and against decode bit for bit in its invariant form."""

from __future__ import annotations

import math

import pytest
import torch

from hisparsim_kernels import errors
from hisparsim_kernels.compare import assert_attention_close
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_invariant import BATCH_INVARIANT_SPLITS, sparse_mla_prefill_invariant
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.references import mla as reference
from hisparsim_kernels.references import rows as rows_reference
from hisparsim_kernels.row_format import RowFormat

SCALE = 1 / math.sqrt(192)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chunk(row_format: RowFormat, heads: int, tokens: int = 9, top_k: int = 96) -> Inputs:
    """A causal chunk from position 0: token i has min(i + 1, top_k) slots; the rows after the chunk are
    NaN."""
    generator = torch.Generator().manual_seed(heads)
    pool = row_format.empty_pool(300)
    pool.view(torch.uint8).fill_(0xFF)
    place = torch.randperm(300, generator=generator)[:200]
    latent = torch.randn(200, 512, generator=generator) / 2
    pool[place] = rows_reference.pack(
        latent, torch.randn(200, 64, generator=generator), row_format, power_of_two_scales=True
    )
    slots = torch.full((tokens, top_k), -1, dtype=torch.int32)
    counts = torch.zeros(tokens, dtype=torch.int32)
    for token in range(tokens):
        visible = min(200, 1 + token * 30)
        chosen = torch.randperm(visible, generator=generator)[:top_k]
        slots[token, : len(chosen)] = place[chosen].int()
        counts[token] = len(chosen)
    counts[tokens // 2] = 0  # a padding token
    q = (torch.randn(tokens, heads, 576, generator=generator) / 2).bfloat16()
    return q, pool, slots, counts


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda f: f.value)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_a_chunk_equals_the_reference(heads: int, row_format: RowFormat) -> None:
    q, pool, slots, counts = chunk(row_format, heads, tokens=5 if heads > 32 else 9)
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=torch.bfloat16)
    lse = torch.full(q.shape[:2], float("nan"))
    sparse_mla_prefill(q, pool, slots, counts, scale=SCALE, out=out, lse=lse)
    assert_attention_close(out, lse, *reference.sparse_mla(q, pool, slots, counts, SCALE))


def test_the_invariant_form_gives_the_bits_of_decode_whatever_the_slices_are() -> None:
    q, pool, slots, counts = chunk(RowFormat.FP8_DS_MLA, 8)
    results = []
    for scratch_tokens in (1, 4, 100):
        out, lse = torch.empty(9, 8, 512), torch.empty(9, 8)
        scratch = DecodeScratch.create(scratch_tokens, 8, BATCH_INVARIANT_SPLITS, "cpu")
        sparse_mla_prefill_invariant(q, pool, slots, counts, scale=SCALE, out=out, lse=lse, scratch=scratch)
        results.append((out, lse))
    for token in range(9):
        part = slice(token, token + 1)
        out, lse = torch.empty(1, 8, 512), torch.empty(1, 8)
        sparse_mla_decode(
            q[part],
            pool,
            slots[part],
            counts[part],
            scale=SCALE,
            out=out,
            lse=lse,
            scratch=DecodeScratch.create(1, 8, BATCH_INVARIANT_SPLITS, "cpu"),
            num_splits=BATCH_INVARIANT_SPLITS,
        )
        for whole_out, whole_lse in results:
            assert torch.equal(out[0], whole_out[token]) and torch.equal(lse[0], whole_lse[token])


def test_scratch_too_small_for_one_token_is_refused() -> None:
    q, pool, slots, counts = chunk(RowFormat.BF16, 16)
    with pytest.raises(errors.RangeError, match="one token of 16 heads needs 128"):
        sparse_mla_prefill_invariant(
            q,
            pool,
            slots,
            counts,
            scale=SCALE,
            out=torch.empty(9, 16, 512),
            lse=torch.empty(9, 16),
            scratch=DecodeScratch.create(1, 1, 4, "cpu"),
        )


def test_an_empty_chunk_enqueues_nothing() -> None:
    q, pool, slots, counts = chunk(RowFormat.BF16, 8)
    sparse_mla_prefill(
        q[:0], pool, slots[:0], counts[:0], scale=SCALE, out=torch.empty(0, 8, 512), lse=torch.empty(0, 8)
    )
