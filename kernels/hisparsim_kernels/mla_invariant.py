"""Batch-invariant sparse MLA: one routine with fixed splits for prefill, verification and decode.

A split covers a fixed range of slots, so with the number of splits fixed a token's result depends on its own
slots and rows alone. Decode under this rule is `sparse_mla_decode(num_splits=BATCH_INVARIANT_SPLITS)`;
prefill is the same kernel, slice by slice of the scratch.
"""

from __future__ import annotations

import torch

from hisparsim_kernels import errors
from hisparsim_kernels.mla_arguments import check_attention_arguments
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode

BATCH_INVARIANT_SPLITS = 8


def sparse_mla_prefill_invariant(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: DecodeScratch,
) -> None:
    """As `sparse_mla_prefill`, bit for bit what `sparse_mla_decode` gives with `BATCH_INVARIANT_SPLITS`.

    The chunk is served in slices that fit `scratch`. Raises `RangeError` when it does not hold even one
    token, and what `sparse_mla_decode` raises.
    """
    check_attention_arguments(q, rows, slots, counts, out, lse, scale)
    scratch.check(q)
    tokens, heads, _ = q.shape
    slice_tokens = scratch.capacity // (heads * BATCH_INVARIANT_SPLITS)
    if slice_tokens < 1:
        raise errors.RangeError(
            f"scratch holds {scratch.capacity} partials; one token of {heads} heads needs "
            f"{heads * BATCH_INVARIANT_SPLITS}"
        )
    for first in range(0, tokens, slice_tokens):
        part = slice(first, min(tokens, first + slice_tokens))
        sparse_mla_decode(
            q[part],
            rows,
            slots[part],
            counts[part],
            scale=scale,
            out=out[part],
            lse=lse[part],
            scratch=scratch,
            num_splits=BATCH_INVARIANT_SPLITS,
        )
