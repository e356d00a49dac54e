"""Nothing is written around an output: guard bytes stand on both sides."""

from __future__ import annotations

import math

import torch

from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.rows import read_rows, write_rows

GUARD = 64


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor inside a larger buffer filled with a pattern, and the buffer."""
    count = math.prod(shape)
    buffer = torch.full((count + 2 * GUARD,), 77, dtype=dtype)
    return buffer[GUARD : GUARD + count].view(shape), buffer


def test_nothing_is_written_around_the_outputs_of_any_kernel() -> None:
    generator = torch.Generator().manual_seed(9)
    pool = torch.randn(50, 576, generator=generator).bfloat16()
    q = torch.randn(3, 5, 576, generator=generator).bfloat16()
    slots, counts = torch.randint(-1, 50, (3, 37), generator=generator).int(), torch.tensor([37, 1, 0]).int()
    buffers = []

    def output(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        inner, buffer = guarded(shape, dtype)
        buffers.append(buffer)
        return inner

    scratch = DecodeScratch(output(3 * 3 * 5 * 512), output(2 * 3 * 3 * 5))
    sparse_mla_decode(
        q,
        pool,
        slots,
        counts,
        scale=0.1,
        out=output(3, 5, 512),
        lse=output(3, 5),
        scratch=scratch,
        num_splits=3,
    )
    sparse_mla_prefill(q, pool, slots, counts, scale=0.1, out=output(3, 5, 512), lse=output(3, 5))
    x, weight = torch.randn(7, 128).bfloat16(), torch.randn(2, 48, 128).bfloat16()
    grouped_gemm(x, weight, torch.tensor([0, 2, 6]).int(), output(7, 48))
    index_pages = output(3, 61 * 256, dtype=torch.uint8)
    index_slots = torch.tensor([0, 60, 61, 182]).int()
    keys = torch.randn(4, 128)
    write_index_keys(keys, index_slots, index_pages, page_size=61, key_format=KeyFormat.BF16)
    index_q = torch.randn(1, 3, 16, 128).bfloat16()
    table = torch.tensor([[2, 0, 1]]).int()
    lengths = torch.tensor([150]).int()
    logits = output(1, 3, 177)
    indexer_logits(
        index_q, torch.randn(1, 3, 16), index_pages, table, lengths, logits, page_size=61, fill=True
    )
    rows = output(11, 576, dtype=torch.bfloat16)
    write_rows(torch.randn(3, 512), torch.randn(3, 64), torch.tensor([0, 10, -1]).int(), rows)
    read_rows(rows, torch.tensor([10, -1, 0]).int(), output(3, 576, dtype=torch.bfloat16))
    for buffer in buffers:
        assert bool((buffer[:GUARD] == 77).all()) and bool((buffer[-GUARD:] == 77).all())
