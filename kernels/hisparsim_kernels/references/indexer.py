"""Reference of the indexer: keys into pages and back, and logits, float64 over what the bytes hold."""

from __future__ import annotations

import torch

from hisparsim_kernels.indexer import KeyFormat
from hisparsim_kernels.row_format import E4M3_MAX, SMALLEST_AMAX

DIM = 128


def write_keys(
    keys: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, page_size: int, key_format: KeyFormat
) -> None:
    """keys [tokens, 128] into `pages` in place; slot = page x page_size + place, -1 writes nothing."""
    for key, slot in zip(keys.float(), slots.tolist(), strict=True):
        if slot < 0:
            continue
        page, place = pages[slot // page_size], slot % page_size
        if key_format is KeyFormat.BF16:
            page[place * 2 * DIM : (place + 1) * 2 * DIM] = key.bfloat16().view(torch.uint8)
            continue
        scale = key.abs().max().clamp_min(SMALLEST_AMAX) / E4M3_MAX
        codes = (key / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        page[place * DIM : (place + 1) * DIM] = codes.view(torch.uint8)
        at = page_size * DIM + 4 * place
        page[at : at + 4] = scale.reshape(1).view(torch.uint8)


def read_keys(pages: torch.Tensor, page_size: int, key_format: KeyFormat) -> torch.Tensor:
    """pages [n, bytes] -> keys [n, page_size, 128] float64, scales applied."""
    count = len(pages)
    if key_format is KeyFormat.BF16:
        flat = pages[:, : page_size * 2 * DIM].contiguous().view(torch.bfloat16)
        return flat.double().reshape(count, page_size, DIM)
    codes = pages[:, : page_size * DIM].contiguous().view(torch.float8_e4m3fn).float().double()
    scales = pages[:, page_size * DIM : page_size * (DIM + 4)].contiguous().view(torch.float32).double()
    return codes.reshape(count, page_size, DIM) * scales[:, :, None]


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    max_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Logits [requests, query_len, max_tokens] float64, -inf where a query sees no token."""
    requests, query_len, _, _ = q.shape
    key_format = KeyFormat.E4M3 if q.dtype == torch.float8_e4m3fn else KeyFormat.BF16
    out = torch.full((requests, query_len, max_tokens), float("-inf"), dtype=torch.float64)
    for request in range(requests):
        length = min(int(lengths[request]), max_tokens)
        if length <= 0:
            continue
        used = table[request, : -(-length // page_size)].long()
        keys = read_keys(pages[used], page_size, key_format).reshape(-1, DIM)[:length]
        for i in range(query_len):
            visible = max(0, length - (query_len - 1 - i))
            score = torch.relu(q[request, i].float().double() @ keys[:visible].T)
            out[request, i, :visible] = weights[request, i].double() @ score
    return out
