"""Indexer logits: requests by context, 32 heads (GLM-5.2) and 64 (DeepSeek-V3.2), with and without drafts;
writes of new keys."""

from __future__ import annotations

import torch

from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof

PAGE = 64


def prepare(
    device: torch.device, key_format: KeyFormat, requests: int, context: int, heads: int, query_len: int
) -> BenchRun:
    """Full contexts over shuffled pages; bytes are random codes, scales are random float32."""
    from hisparsim_kernels.references.indexer import indexer_logits as reference

    generator = torch.Generator(device=device).manual_seed(2)
    num_pages = requests * context // PAGE
    pages = torch.empty(num_pages, PAGE * key_format.token_bytes, dtype=torch.uint8, device=device)
    keys = pages[:, : PAGE * 128 * key_format.torch_dtype.itemsize]
    for first in range(0, num_pages, 1024):
        part = keys[first : first + 1024]
        values = torch.randn(part.shape[0], PAGE * 128, generator=generator, device=device)
        part.copy_(values.to(key_format.torch_dtype).view(torch.uint8))
    if key_format is KeyFormat.E4M3:
        scales = torch.rand(num_pages, PAGE, generator=generator, device=device)
        pages[:, PAGE * 128 :] = scales.view(torch.uint8)
    table = torch.randperm(num_pages, generator=generator, device=device).int().reshape(requests, -1)
    q = torch.randn(requests, query_len, heads, 128, generator=generator, device=device).to(
        key_format.torch_dtype
    )
    weights = torch.randn(requests, query_len, heads, generator=generator, device=device)
    lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
    logits = torch.empty(requests, query_len, context, device=device)
    return BenchRun(
        run=lambda: indexer_logits(q, weights, pages, table, lengths, logits, page_size=PAGE),
        reference=lambda: reference(q, weights, pages, table, lengths, context, PAGE),
        moved_bytes=requests * context * (key_format.token_bytes + 4 * query_len),
        flops=2 * requests * context * query_len * heads * 128,
    )


def prepare_write(device: torch.device, key_format: KeyFormat, tokens: int) -> BenchRun:
    """New keys into scattered places of pages."""
    from hisparsim_kernels.references.indexer import write_keys as reference

    generator = torch.Generator(device=device).manual_seed(3)
    num_pages = -(-4 * tokens // PAGE)
    pages = torch.zeros(num_pages, PAGE * key_format.token_bytes, dtype=torch.uint8, device=device)
    keys = torch.randn(tokens, 128, generator=generator, device=device).bfloat16()
    slots = torch.randperm(num_pages * PAGE, generator=generator, device=device)[:tokens].int()
    return BenchRun(
        run=lambda: write_index_keys(keys, slots, pages, page_size=PAGE, key_format=key_format),
        reference=lambda: reference(keys, slots, pages, PAGE, key_format),
        moved_bytes=tokens * (256 + key_format.token_bytes),
    )


def _write_case(key_format: KeyFormat, tokens: int) -> BenchCase:
    return BenchCase(
        "write_index_keys",
        f"{key_format.value} {tokens} tokens",
        Roof.HBM,
        lambda device: prepare_write(device, key_format, tokens),
        tiny=tokens <= 256,
    )


def _case(key_format: KeyFormat, requests: int, context: int, heads: int, query_len: int) -> BenchCase:
    drafts = f" mtp{query_len - 1}" if query_len > 1 else ""
    return BenchCase(
        "indexer_logits",
        f"{key_format.value} {requests} x {context} tokens {heads} heads{drafts}",
        Roof.HBM,
        lambda device: prepare(device, key_format, requests, context, heads, query_len),
        tiny=requests * context <= 8192,
    )


BENCH_CASES = tuple(
    _case(key_format, requests, context, heads, query_len)
    for key_format in KeyFormat
    for requests, context, heads, query_len in (
        (1, 8192, 32, 1),
        (1, 131072, 32, 1),
        (32, 32768, 32, 1),
        (32, 131072, 32, 1),
        (32, 131072, 32, 4),
        (32, 131072, 64, 1),
        (1, 1048576, 32, 1),
    )
) + tuple(_write_case(key_format, tokens) for key_format in KeyFormat for tokens in (256, 32768))
