"""Top-k of 2048 over decode batches: contexts from 8K to a million, against torch.topk."""

from __future__ import annotations

import torch

from hisparsim_kernels.references.topk import topk_reference
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.topk import TopkScratch, topk, topk_config

TOP_K = 2048


def prepare(device: torch.device, rows: int, context: int) -> BenchRun:
    """Normal logits, contexts of 70 to 100 % of the capacity."""
    generator = torch.Generator(device=device).manual_seed(3)
    logits = torch.randn(rows, context, device=device, generator=generator)
    lengths = torch.randint(
        context * 7 // 10, context + 1, (rows,), dtype=torch.int32, device=device, generator=generator
    )
    indices = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    num_splits = int(topk_config(context, device)[1].meta["NUM_SPLITS"])
    scratch = TopkScratch.allocate(rows, num_splits, device)

    def run() -> None:
        topk(logits, lengths, TOP_K, indices=indices, counts=counts, scratch=scratch)

    def reference() -> None:
        topk_reference(logits, lengths, TOP_K)

    def torch_topk() -> None:
        torch.topk(logits, TOP_K, dim=1, sorted=False)

    return BenchRun(
        run, reference, moved_bytes=4 * (int(lengths.sum()) + indices.numel() + rows), torch_op=torch_topk
    )


def _case(rows: int, context: int) -> BenchCase:
    return BenchCase(
        "topk",
        f"{rows} rows of {context} positions",
        Roof.HBM,
        lambda device: prepare(device, rows, context),
        tiny=rows * context <= 1 << 16,
    )


BENCH_CASES = tuple(
    _case(rows, context) for rows, context in ((4, 8192), (8, 65536), (64, 32768), (16, 131072), (4, 1 << 20))
)
