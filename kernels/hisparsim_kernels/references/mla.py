"""Reference of sparse MLA, decode and prefill alike: float64 over the values that the rows hold."""

from __future__ import annotations

import torch

from hisparsim_kernels.references.rows import unpack
from hisparsim_kernels.row_format import LATENT_COLUMNS


def sparse_mla(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [tokens, heads, 576], rows of either format, slots [tokens, top_k], counts [tokens] -> out [tokens,
    heads, 512] and lse [tokens, heads] (natural logarithm), both float64. No valid slot: out 0, lse +inf."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, LATENT_COLUMNS, dtype=torch.float64)
    lse = torch.full((tokens, heads), float("inf"), dtype=torch.float64)
    for token in range(tokens):
        chosen = slots[token, : max(0, int(counts[token]))]
        chosen = chosen[chosen >= 0].long()
        if len(chosen):
            keys = unpack(rows[chosen])
            score = scale * q[token].double() @ keys.T
            lse[token] = torch.logsumexp(score, -1)
            out[token] = torch.softmax(score, -1) @ keys[:, :LATENT_COLUMNS]
    return out, lse
