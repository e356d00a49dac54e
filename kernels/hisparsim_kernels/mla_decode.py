# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Sparse MLA decode: split-K over gathered rows, then a merge of the splits by their log-sum-exp.

    q        [tokens, heads, 576]      bf16, contiguous: 512 absorbed latent, then 64 rope
    rows     [num_rows, 576] bf16 or [num_rows, 656] uint8 (`row_format`), contiguous: the whole pool,
             resident pages and hot rows alike; a slot names a row of it
    slots    [tokens, top_k]           int32, flat row numbers; -1 is skipped
    counts   [tokens]                  int32, only the first counts[t] slots are read; 0 is legal
    out      [tokens, heads, 512]      bf16 or float32
    lse      [tokens, heads]           float32, natural logarithm; +inf where no slot is valid (out is 0)

`tokens` is requests times verification rows (1 to 4 with speculative decoding). The grid is fixed by shapes,
splits past the valid count leave early, and every element of `out` and `lse` is written. Nothing is
allocated: scratch comes from `DecodeScratch`, made once for the largest batch.

A split covers a fixed range of slots, so a token's result depends on `num_splits` and the configuration
alone, not on the other tokens of the batch: with `num_splits` held fixed
(`mla_invariant.BATCH_INVARIANT_SPLITS`) the kernel is batch-invariant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hisparsim_kernels import errors
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.mla_arguments import MAX_HEADS, check_attention_arguments, head_block
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.mla_tile import LATENT, WIDTH, attend_slots
from hisparsim_kernels.registry import AotCase
from hisparsim_kernels.row_format import RowFormat

MAX_SPLITS = 32


@triton.jit
def _split_kernel(
    q_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    partial_ptr,  # [tokens, NUM_SPLITS, HEADS, 512] float32, not divided by the sum
    stats_ptr,  # [tokens, NUM_SPLITS, 2, HEADS] float32: maximum (base 2), sum
    scale_log2,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    BLOCKS: tl.constexpr = (TOP_K + BLOCK_ROWS - 1) // BLOCK_ROWS
    PER_SPLIT: tl.constexpr = (BLOCKS + NUM_SPLITS - 1) // NUM_SPLITS * BLOCK_ROWS
    first = split * PER_SPLIT
    last = tl.minimum(first + PER_SPLIT, tl.minimum(tl.load(counts_ptr + token), TOP_K))
    part = token * NUM_SPLITS + split
    stats_at = stats_ptr + part * (2 * HEADS) + head
    if first >= last:
        # The partial output is left as it was: the merge reads none whose sum is 0.
        tl.store(stats_at + HEADS, tl.zeros((BLOCK_HEADS,), tl.float32), mask=head < HEADS)
        return
    out, top, total = attend_slots(
        q_ptr + token * HEADS * WIDTH,
        rows_ptr,
        slots_ptr + token * TOP_K,
        first,
        last,
        head,
        scale_log2,
        HEADS,
        BLOCK_HEADS,
        BLOCK_ROWS,
        FP8,
    )
    tl.store(stats_at, top, mask=head < HEADS)
    tl.store(stats_at + HEADS, total, mask=head < HEADS)
    out_at = partial_ptr + (part * HEADS + head)[:, None] * LATENT
    tl.store(out_at + tl.arange(0, LATENT)[None, :], out, mask=(head < HEADS)[:, None])


@triton.jit
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    part = token * NUM_SPLITS + split
    stats_at = stats_ptr + part * (2 * HEADS) + head
    total = tl.load(stats_at + HEADS, mask=split < NUM_SPLITS, other=0.0)
    live = total != 0.0  # NaN counts: a corrupt row must show in the output
    top = tl.load(stats_at, mask=live, other=float("-inf"))
    highest = tl.max(top, 0)
    against = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.where(live, tl.exp2(top - against), 0.0)
    whole = tl.sum(total * weight, 0)
    divisor = tl.where(whole != 0.0, whole, 1.0)
    column = tl.arange(0, LATENT)
    # A split without valid slots wrote no partial: its old content, NaN perhaps, must not be read.
    partial_at = partial_ptr + (part * HEADS + head)[:, None] * LATENT + column[None, :]
    partial = tl.load(partial_at, mask=live[:, None], other=0.0)
    merged = tl.sum(partial * weight[:, None], 0) / divisor
    tl.store(out_ptr + (token * HEADS + head) * LATENT + column, merged.to(out_ptr.dtype.element_ty))
    natural = tl.where(whole != 0.0, (against + tl.log2(divisor)) * 0.6931471805599453, float("inf"))
    tl.store(lse_ptr + token * HEADS + head, natural)


@dataclass(frozen=True)
class DecodeScratch:
    """Persistent partial results, float32: `partial` [tokens, splits, heads, 512] and `stats` [tokens,
    splits, 2, heads] (maximum in base 2, sum), both flat.

    One is made for the largest batch and reused by every launch of one stream, captured ones included.
    """

    partial: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def create(
        cls, max_tokens: int, heads: int, max_splits: int, device: torch.device | str
    ) -> DecodeScratch:
        """Allocate scratch for up to `max_tokens` tokens of `heads` heads in up to `max_splits` splits."""
        errors.check_range("max_splits", max_splits, 1, MAX_SPLITS, "the merge holds all splits at once")
        errors.check_range("heads", heads, 1, MAX_HEADS, "sparse MLA kernels serve up to 128 heads")
        errors.check_range("max_tokens", max_tokens, 1, 2**31 - 1, "scratch holds at least one token")
        size = max_tokens * max_splits * heads
        partial = torch.empty(size * LATENT.value, dtype=torch.float32, device=device)
        return cls(partial, torch.empty(2 * size, dtype=torch.float32, device=device))

    @property
    def capacity(self) -> int:
        """Tokens x heads x splits that fit."""
        return min(self.stats.numel() // 2, self.partial.numel() // int(LATENT.value))

    def check(self, q: torch.Tensor) -> None:
        """Raise the named error that fits unless both buffers are flat float32 on the device of `q`."""
        for name, tensor in (("scratch.partial", self.partial), ("scratch.stats", self.stats)):
            errors.check_dtype(name, tensor, torch.float32)
            errors.check_shape(name, tensor, (None,))
            errors.check_contiguous(name, tensor)
        errors.check_same_device(q=q, partial=self.partial, stats=self.stats)


def decode_config(row_format: RowFormat, heads: int, arch: str) -> LaunchConfig:
    """The default configuration of the split kernel: the smallest head block that covers `heads` without
    waste.
    """
    return find_config("mla_decode", "mla_decode_split", f"{row_format.value}-h{head_block(heads)}", arch)


def plan_splits(tokens: int, heads: int, top_k: int, config: LaunchConfig, num_sms: int = 132) -> int:
    """Splits that fill the multiprocessors once: the largest power of two with at most `num_sms` programs, at
    least 1, at most one per block of rows. Depends on shapes alone, so it is fixed for a graph bucket."""
    head_blocks = -(-heads // config.meta["BLOCK_HEADS"])
    blocks = -(-top_k // config.meta["BLOCK_ROWS"])
    room = max(1, min(num_sms // max(1, tokens * head_blocks), blocks, MAX_SPLITS))
    return int(2 ** int(math.log2(room)))


def sparse_mla_decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: DecodeScratch,
    num_splits: int,
    config: LaunchConfig | None = None,
) -> None:
    """Enqueue attention of `q` over the rows that `slots` names, writing all of `out` and `lse`.

    Shapes and types stand in the module's docstring. `scale` multiplies the scores (1/sqrt(192 + 64) for
    GLM-5). `num_splits` comes from `plan_splits`, or is `mla_invariant.BATCH_INVARIANT_SPLITS` for results
    independent of the batch. Raises `DtypeError`, `ShapeError`, `StrideError`, `DeviceError` or `RangeError`
    before anything is enqueued.
    """
    row_format, device = check_attention_arguments(q, rows, slots, counts, out, lse, scale)
    scratch.check(q)
    errors.check_range("num_splits", num_splits, 1, MAX_SPLITS, "the merge holds all splits at once")
    tokens, heads, _ = q.shape
    needed = tokens * heads * num_splits
    if num_splits > 1 and needed > scratch.capacity:
        raise errors.RangeError(
            f"scratch holds {scratch.capacity} partials; {tokens} tokens x {heads} heads x {num_splits} "
            f"splits need {needed}: make DecodeScratch for the largest batch"
        )
    if num_splits == 1:
        # One program a token and block of heads, and nothing to merge: what prefill does.
        sparse_mla_prefill(q, rows, slots, counts, scale=scale, out=out, lse=lse, config=config)
        return
    if tokens == 0:
        return
    if config is None:
        config = decode_config(row_format, heads, arch_of(device))
    grid = (tokens, num_splits, -(-heads // config.meta["BLOCK_HEADS"]))
    _split_kernel[grid](
        q,
        rows,
        slots,
        counts,
        scratch.partial,
        scratch.stats,
        scale * 1.4426950408889634,
        HEADS=heads,
        TOP_K=slots.shape[1],
        NUM_SPLITS=num_splits,
        FP8=row_format is RowFormat.FP8_DS_MLA,
        **config.launch_arguments(),
    )
    merge = find_config("mla_decode", "mla_decode_merge", "default", arch_of(device))
    _merge_kernel[(tokens, heads)](
        scratch.partial,
        scratch.stats,
        out,
        lse,
        HEADS=heads,
        NUM_SPLITS=num_splits,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        **merge.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    pointers = {"q_ptr": "*bf16", "slots_ptr": "*i32", "counts_ptr": "*i32", "scale_log2": "fp32"}
    partials = {"partial_ptr": "*fp32", "stats_ptr": "*fp32"}
    cases = []
    for row_format in RowFormat:
        fp8 = row_format is RowFormat.FP8_DS_MLA
        types = pointers | partials | {"rows_ptr": "*u8" if fp8 else "*bf16"}
        for heads, num_splits in ((8, 16), (16, 16), (32, 8), (64, 4), (128, 2)):
            constants = {"HEADS": heads, "TOP_K": 2048, "NUM_SPLITS": num_splits, "FP8": fp8}
            config, shape = f"{row_format.value}-h{head_block(heads)}", f"{heads}x{num_splits}"
            cases.append(AotCase("mla_decode_split", config, _split_kernel, types, constants, shape=shape))
    merge = partials | {"out_ptr": "*bf16", "lse_ptr": "*fp32"}
    for num_splits in (2, 16, MAX_SPLITS):
        constants = {"HEADS": 16, "NUM_SPLITS": num_splits, "BLOCK_SPLITS": num_splits}
        shape = f"{num_splits} splits"
        cases.append(AotCase("mla_decode_merge", "default", _merge_kernel, merge, constants, shape=shape))
    return tuple(cases)


AOT_CASES = _aot_cases()
