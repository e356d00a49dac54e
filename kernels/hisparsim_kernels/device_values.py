# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Value checks of the kernels on a device: host memory, attention, indexer, top-k, rows, products, residency,
replay.

On a CPU the same functions run in the interpreter at small sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from hisparsim_kernels.benchmarks.inputs import AttentionInputs, attention_inputs
from hisparsim_kernels.compare import assert_attention_close
from hisparsim_kernels.configs import LaunchConfig
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.indexer import KeyFormat, indexer_logits
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references import grouped_gemm as gemm_reference
from hisparsim_kernels.references import indexer as indexer_reference
from hisparsim_kernels.references import mla as mla_reference
from hisparsim_kernels.references import rows as rows_reference
from hisparsim_kernels.residency_check import check_residency
from hisparsim_kernels.row_format import RowFormat
from hisparsim_kernels.rows import write_rows
from hisparsim_kernels.topk import TopkScratch, topk, topk_config

SCALE = 1 / math.sqrt(256)


@dataclass(frozen=True)
class Outcome:
    """What a check function found; `passed` None means that nothing was judged."""

    passed: bool | None
    detail: str
    figures: dict[str, float] = field(default_factory=dict)


@triton.jit
def _copy_words_kernel(source_ptr, target_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    source = source_ptr.to(tl.pointer_type(tl.int32))
    tl.store(target_ptr + at, tl.load(source + at))


def check_host_memory(device: torch.device) -> Outcome:
    """A kernel reads a pinned tensor passed as it is, and by its address as an int64."""
    pinned = torch.arange(1024, dtype=torch.int32)
    if device.type == "cuda":
        pinned = pinned.pin_memory()
    found = []
    for source in (pinned, pinned.data_ptr()):
        target = torch.full((1024,), -1, dtype=torch.int32, device=device)
        _copy_words_kernel[(1,)](source, target, COUNT=1024)
        found.append(torch.equal(target.cpu(), pinned))
    return Outcome(all(found), f"tensor argument {found[0]}, int64 address {found[1]}")


def decode(
    inputs: AttentionInputs, scratch: DecodeScratch, num_splits: int, config: LaunchConfig | None = None
) -> None:
    """Enqueue decode of prepared inputs."""
    sparse_mla_decode(
        inputs.q,
        inputs.rows,
        inputs.slots,
        inputs.counts,
        scale=SCALE,
        out=inputs.out,
        lse=inputs.lse,
        scratch=scratch,
        num_splits=num_splits,
        config=config,
    )


def check_attention(device: torch.device) -> Outcome:
    """Decode and prefill of both row formats against float64, -1 slots and short counts included."""
    on_gpu = device.type == "cuda"
    top_k = 2048 if on_gpu else 128
    tried = 0
    for row_format in RowFormat:
        for heads in (8, 16, 32, 64, 128) if on_gpu else (8,):
            inputs = attention_inputs(device, row_format, 3, heads, top_k=top_k, num_rows=4 * top_k)
            inputs.slots[0, : top_k // 2] = -1
            inputs.counts[1] = 77
            inputs.counts[2] = 0
            want = mla_reference.sparse_mla(
                inputs.q.cpu(), inputs.rows.cpu(), inputs.slots.cpu(), inputs.counts.cpu(), SCALE
            )
            for num_splits in (1, 8):
                inputs.out.fill_(float("nan"))
                scratch = DecodeScratch.create(3, heads, num_splits, device)
                scratch.partial.fill_(float("nan"))
                decode(inputs, scratch, num_splits)
                assert_attention_close(inputs.out.cpu(), inputs.lse.cpu(), *want)
            inputs.out.fill_(float("nan"))
            sparse_mla_prefill(
                inputs.q,
                inputs.rows,
                inputs.slots,
                inputs.counts,
                scale=SCALE,
                out=inputs.out,
                lse=inputs.lse,
            )
            assert_attention_close(inputs.out.cpu(), inputs.lse.cpu(), *want)
            tried += 3
    return Outcome(True, f"{tried} launches within tolerance")


def check_indexer_and_topk(device: torch.device) -> Outcome:
    """Logits of both key formats against float64; top-k of the kernel's logits against a stable sort."""
    generator = torch.Generator().manual_seed(7)
    tokens, k = (8192, 2048) if device.type == "cuda" else (512, 64)
    worst = 0.0
    for key_format in KeyFormat:
        pages = torch.zeros(tokens // 64, 64 * key_format.token_bytes, dtype=torch.uint8)
        keys = torch.randn(tokens, 128, generator=generator)
        indexer_reference.write_keys(keys, torch.arange(tokens).int(), pages, 64, key_format)
        q = torch.randn(1, 2, 32, 128, generator=generator).to(key_format.torch_dtype)
        weights = torch.randn(1, 2, 32, generator=generator)
        table = torch.arange(tokens // 64, dtype=torch.int32)[None]
        lengths = torch.tensor([tokens - 100], dtype=torch.int32)
        logits = torch.full((1, 2, tokens), float("nan"), device=device)
        lengths_there = lengths.to(device)
        indexer_logits(
            q.to(device),
            weights.to(device),
            pages.to(device),
            table.to(device),
            lengths_there,
            logits,
            page_size=64,
            fill=True,
        )
        want = indexer_reference.indexer_logits(q, weights, pages, table, lengths, tokens, 64)
        seen = ~want.isinf()
        got = logits.cpu().double()
        error = ((got - want)[seen].norm() / want[seen].norm()).item()
        worst = max(worst, error)
        if not torch.equal(got.isinf(), want.isinf()) or not error < 1e-3:
            return Outcome(False, f"{key_format.value} logits: relative error {error:.2e} or misplaced -inf")
        indices, counts = topk(logits[0], lengths_there, k, query_len=2)
        order = torch.sort(logits[0].cpu(), dim=-1, descending=True, stable=True).indices[:, :k]
        if not torch.equal(indices.cpu().long(), order.sort(-1).values) or set(counts.tolist()) != {k}:
            return Outcome(False, f"{key_format.value}: top-k differs from a stable sort")
    return Outcome(
        True, f"relative error of logits at most {worst:.1e}; top-k equal", {"logits_error": worst}
    )


def check_rows_and_gemm(device: torch.device) -> Outcome:
    """Row writes byte for byte; grouped GEMM of both types with empty groups and padding rows."""
    generator = torch.Generator().manual_seed(8)
    latent, rope = torch.randn(50, 512, generator=generator), torch.randn(50, 64, generator=generator)
    slots = torch.randperm(80, generator=generator)[:50].int()
    for row_format in RowFormat:
        pool = row_format.empty_pool(80)
        pool.view(torch.uint8).fill_(0xA5)
        on_device = pool.to(device)
        rows_reference.write_rows(latent, rope, slots, pool)
        write_rows(latent.to(device), rope.to(device), slots.to(device), on_device)
        if not torch.equal(on_device.cpu().view(torch.uint8), pool.view(torch.uint8)):
            return Outcome(False, f"{row_format.value} rows differ from the reference")
    offsets = torch.tensor([0, 5, 5, 90], dtype=torch.int32)
    x = torch.randn(100, 512, generator=generator)
    weight = torch.randn(3, 256, 512, generator=generator)
    x8, w8 = gemm_reference.quantise_rows(x), gemm_reference.quantise_weight(weight)
    out = torch.full((100, 256), float("nan"), device=device)
    grouped_gemm(x.bfloat16().to(device), weight.bfloat16().to(device), offsets.to(device), out)
    want = gemm_reference.grouped_gemm(x.bfloat16(), weight.bfloat16(), offsets)
    errors = {"bf16": ((out.cpu().double() - want).norm() / want.norm()).item()}
    grouped_gemm(
        x8[0].to(device),
        w8[0].to(device),
        offsets.to(device),
        out,
        x_scale=x8[1].to(device),
        w_scale=w8[1].to(device),
    )
    want = gemm_reference.grouped_gemm(x8[0], w8[0], offsets, x8[1], w8[1])
    errors["fp8"] = ((out.cpu().double() - want).norm() / want.norm()).item()
    return Outcome(max(errors.values()) < 2e-3, f"relative errors of the products {errors}", errors)


def check_replay(device: torch.device) -> Outcome:
    """A captured decode step replayed with changed queries, slots and counts gives the bits of an eager
    run."""
    top_k, tokens, heads, splits = (2048, 8, 16, 16) if device.type == "cuda" else (64, 2, 8, 4)
    inputs = attention_inputs(device, RowFormat.FP8_DS_MLA, tokens, heads, top_k=top_k, num_rows=8 * top_k)
    other = attention_inputs(
        device, RowFormat.FP8_DS_MLA, tokens, heads, top_k=top_k, num_rows=8 * top_k, seed=1
    )
    logits = torch.randn(tokens, 4 * top_k, device=device)
    other_logits = torch.randn(tokens, 4 * top_k, device=device)
    lengths = torch.full((tokens,), 4 * top_k, dtype=torch.int32, device=device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    scratch = DecodeScratch.create(tokens, heads, splits, device)
    top_scratch = TopkScratch.allocate(
        tokens, int(topk_config(4 * top_k, device)[1].meta["NUM_SPLITS"]), device
    )

    def step() -> None:
        topk(logits, lengths, top_k, indices=chosen, counts=counts, scratch=top_scratch)
        inputs.slots.copy_(chosen)
        decode(inputs, scratch, splits)

    def change(to: AttentionInputs, new_logits: torch.Tensor, length: int) -> None:
        inputs.q.copy_(to.q)
        logits.copy_(new_logits)
        lengths.fill_(length)
        inputs.counts.copy_(torch.arange(tokens, device=device) * (top_k // tokens))
        for output in (inputs.out, inputs.lse, scratch.partial, scratch.stats):
            output.fill_(float("nan"))
        chosen.fill_(-2)

    replay: Callable[[], None] = step
    if device.type == "cuda":
        from hisparsim_kernels.bench import capture

        replay = capture(step, 1).replay
    different = []
    for seed, length in enumerate((4 * top_k, 3 * top_k, top_k // 2, 0)):
        change(other, other_logits.roll(seed, -1), length)
        replay()
        replayed = (inputs.out.clone(), inputs.lse.clone(), chosen.clone(), counts.clone())
        change(other, other_logits.roll(seed, -1), length)
        step()
        eager = (inputs.out, inputs.lse, chosen, counts)
        if (
            not all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
            or inputs.out.isnan().any()
        ):
            different.append(length)
    return Outcome(not different, f"lengths that differ: {different or 'none'}")


def check_canaries(device: torch.device) -> Outcome:
    """Mirror and gather leave every byte outside their rows as it was (guard blocks around and between)."""
    layout = PageLayout.of_groups(656, (4,))
    generator = torch.Generator().manual_seed(9)
    pool = torch.randint(0, 256, (6, layout.block_bytes), dtype=torch.uint8, generator=generator).to(device)
    host = torch.full((6, layout.host_block_bytes), 0x5A, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pool_rows = (2 * layout.rows_per_block + torch.arange(0, 64, 3)).int().to(device)
    host_rows = (3 * 64 + torch.arange(22)).int().to(device)
    hot_rows = (4 * layout.rows_per_block + torch.arange(22)).int().to(device)
    count = torch.tensor([22], dtype=torch.int32, device=device)
    before = pool.cpu().clone()
    mirror_rows(pool, host, pool_rows, host_rows, count, layout, group=0)
    gather_rows(host, pool, host_rows, hot_rows, count, layout, group=0)
    after = pool.cpu()
    intact = bool((host[[0, 1, 2, 4, 5]] == 0x5A).all()) and torch.equal(
        after[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]]
    )
    copied = all(
        torch.equal(
            layout.layer_rows(after, layer)[hot_rows.cpu().long()],
            layout.layer_rows(before, layer)[pool_rows.cpu().long()],
        )
        for layer in range(4)
    )
    return Outcome(intact and copied, f"guards intact {intact}, rows equal {copied}")


def check_residency_steps(device: torch.device) -> Outcome:
    """Resolve and gather, replayed from a captured graph, against the sequential LRU model."""
    return Outcome(*check_residency(device))


Check = Callable[[torch.device], Outcome]
VALUE_CHECKS: tuple[tuple[str, Check], ...] = (
    ("host memory", check_host_memory),
    ("attention values", check_attention),
    ("indexer and top-k values", check_indexer_and_topk),
    ("rows and grouped GEMM values", check_rows_and_gemm),
    ("canaries", check_canaries),
    ("residency", check_residency_steps),
    ("graph replay", check_replay),
)
