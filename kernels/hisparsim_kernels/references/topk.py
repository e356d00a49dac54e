"""Top-k by a stable sort in float64: the meaning of `hisparsim_kernels.topk`, row by row."""

from __future__ import annotations

import torch


def topk_reference(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, query_len: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [num_rows, k] int32 (ascending, then -1) and counts [num_rows] int32 of the k largest logits.

    Equal logits go by the lower position; -inf and NaN are never selected.
    """
    num_rows, max_len = logits.shape
    indices = torch.full((num_rows, k), -1, dtype=torch.int32)
    counts = torch.zeros(num_rows, dtype=torch.int32)
    for row in range(num_rows):
        length = int(lengths[row // query_len]) - (query_len - 1 - row % query_len)
        values = logits[row, : max(0, min(length, max_len))].double().cpu()
        valid = torch.nonzero(values > float("-inf")).flatten()
        order = torch.sort(values[valid], descending=True, stable=True).indices[:k]
        chosen = torch.sort(valid[order]).values.to(torch.int32)
        indices[row, : len(chosen)] = chosen
        counts[row] = len(chosen)
    return indices.to(logits.device), counts.to(logits.device)
