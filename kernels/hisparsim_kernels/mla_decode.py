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
alone, not on the other tokens of the batch: with `num_splits` held fixed (`BATCH_INVARIANT_SPLITS`) the
kernel is batch-invariant.
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
from hisparsim_kernels.mla_tile import LATENT, WIDTH, attend_slots
from hisparsim_kernels.registry import AotCase
from hisparsim_kernels.row_format import RowFormat, row_format_of

MAX_SPLITS = 32
MAX_HEADS = 128
BATCH_INVARIANT_SPLITS = 8


@triton.jit
def _split_kernel(
    q_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    partial_ptr,  # [tokens, NUM_SPLITS, HEADS, 512] float32
    partial_lse_ptr,  # [tokens, NUM_SPLITS, HEADS] float32, base 2
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
    lse_at = partial_lse_ptr + (token * NUM_SPLITS + split) * HEADS + head
    if first >= last:
        tl.store(lse_at, tl.full((BLOCK_HEADS,), float("-inf"), tl.float32), mask=head < HEADS)
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
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    tl.store(lse_at, tl.where(some, top + tl.log2(divisor), float("-inf")), mask=head < HEADS)
    out_at = partial_ptr + ((token * NUM_SPLITS + split) * HEADS + head)[:, None] * LATENT
    tl.store(out_at + tl.arange(0, LATENT)[None, :], out / divisor[:, None], mask=(head < HEADS)[:, None])


@triton.jit
def _merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    at = (token * NUM_SPLITS + split) * HEADS + head
    lse = tl.load(partial_lse_ptr + at, mask=split < NUM_SPLITS, other=float("-inf"))
    live = lse > float("-inf")
    top = tl.max(lse, 0)
    against = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.where(live, tl.exp2(lse - against), 0.0)
    total = tl.sum(weight, 0)
    column = tl.arange(0, LATENT)
    # A split without valid slots wrote no partial: its old content, NaN perhaps, must not be read.
    partial = tl.load(partial_ptr + at[:, None] * LATENT + column[None, :], mask=live[:, None], other=0.0)
    merged = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (token * HEADS + head) * LATENT + column, merged.to(out_ptr.dtype.element_ty))
    ln2 = 0.6931471805599453
    natural = tl.where(
        total > 0.0, (against + tl.log2(tl.where(total > 0.0, total, 1.0))) * ln2, float("inf")
    )
    tl.store(lse_ptr + token * HEADS + head, natural)


@dataclass(frozen=True)
class DecodeScratch:
    """Persistent partial results: `partial` [tokens, splits, heads, 512] and `lse` [tokens, splits, heads],
    float32.

    One is made for the largest batch and reused by every launch of one stream, captured ones included.
    """

    partial: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def create(
        cls, max_tokens: int, heads: int, max_splits: int, device: torch.device | str
    ) -> DecodeScratch:
        """Allocate scratch for up to `max_tokens` tokens of `heads` heads in up to `max_splits` splits."""
        errors.check_range(
            "max_splits", max_splits, 1, MAX_SPLITS, "the merge holds all splits of a head at once"
        )
        errors.check_range("heads", heads, 1, MAX_HEADS, "sparse MLA kernels serve up to 128 heads")
        size = max_tokens * max_splits * heads
        partial = torch.empty(size * LATENT.value, dtype=torch.float32, device=device)
        return cls(partial, torch.empty(size, dtype=torch.float32, device=device))

    def holds(self, tokens: int, heads: int, num_splits: int) -> bool:
        """Whether a launch of these sizes fits."""
        return tokens * heads * num_splits <= self.lse.numel()


def decode_config(row_format: RowFormat, heads: int, arch: str) -> LaunchConfig:
    """The default configuration of the split kernel: the smallest head block that covers `heads` without
    waste.
    """
    block = 16 if heads <= 16 else 32 if heads <= 32 else 64
    return find_config("mla_decode", "mla_decode_split", f"{row_format.value}-h{block}", arch)


def plan_splits(tokens: int, heads: int, top_k: int, config: LaunchConfig, num_sms: int = 132) -> int:
    """Splits that fill the multiprocessors once: the largest power of two with at most `num_sms` programs, at
    least 1, at most one per block of rows. Depends on shapes alone, so it is fixed for a graph bucket."""
    head_blocks = -(-heads // config.meta["BLOCK_HEADS"])
    blocks = -(-top_k // config.meta["BLOCK_ROWS"])
    room = max(1, min(num_sms // max(1, tokens * head_blocks), blocks, MAX_SPLITS))
    return int(2 ** int(math.log2(room)))


def check_attention_arguments(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[RowFormat, torch.device]:
    """The row format and the common device of an attention call; a `KernelInputError` for what breaks its
    contract.
    """
    row_format = row_format_of(rows)
    errors.check_dtype("q", q, torch.bfloat16)
    errors.check_shape("q", q, (None, None, WIDTH.value))
    tokens, heads, _ = q.shape
    errors.check_range("heads", heads, 1, MAX_HEADS, "sparse MLA kernels serve up to 128 heads")
    errors.check_dtype("slots", slots, torch.int32)
    errors.check_shape("slots", slots, (tokens, None))
    errors.check_dtype("counts", counts, torch.int32)
    errors.check_shape("counts", counts, (tokens,))
    errors.check_dtype("out", out, torch.bfloat16, torch.float32)
    errors.check_shape("out", out, (tokens, heads, LATENT.value))
    errors.check_dtype("lse", lse, torch.float32)
    errors.check_shape("lse", lse, (tokens, heads))
    for name, tensor in {"q": q, "slots": slots, "counts": counts, "out": out, "lse": lse}.items():
        errors.check_contiguous(name, tensor)
    device = errors.check_same_device(q=q, rows=rows, slots=slots, counts=counts, out=out, lse=lse)
    return row_format, device


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
    GLM-5). `num_splits` comes from `plan_splits`, or is `BATCH_INVARIANT_SPLITS` for results independent of
    the batch. Raises `DtypeError`, `ShapeError`, `StrideError`, `DeviceError` or `RangeError` before anything
    is enqueued.
    """
    row_format, device = check_attention_arguments(q, rows, slots, counts, out, lse)
    errors.check_same_device(q=q, scratch=scratch.partial)
    errors.check_range(
        "num_splits", num_splits, 1, MAX_SPLITS, "the merge holds all splits of a head at once"
    )
    tokens, heads, _ = q.shape
    if not scratch.holds(tokens, heads, num_splits):
        raise errors.RangeError(
            f"scratch holds {scratch.lse.numel()} partials; {tokens} tokens x {heads} heads x {num_splits} "
            f"splits need {tokens * heads * num_splits}: make DecodeScratch for the largest batch"
        )
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
        scratch.lse,
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
        scratch.lse,
        out,
        lse,
        HEADS=heads,
        NUM_SPLITS=num_splits,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        **merge.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    pointers = {"q_ptr": "*bf16", "slots_ptr": "*i32", "counts_ptr": "*i32", "scale_log2": "fp32"}
    partials = {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    cases = []
    for row_format in RowFormat:
        fp8 = row_format is RowFormat.FP8_DS_MLA
        types = pointers | partials | {"rows_ptr": "*u8" if fp8 else "*bf16"}
        for heads, num_splits in ((8, 16), (16, 16), (32, 8), (64, 4), (128, 2), (16, 1)):
            block = 16 if heads <= 16 else 32 if heads <= 32 else 64
            constants = {"HEADS": heads, "TOP_K": 2048, "NUM_SPLITS": num_splits, "FP8": fp8}
            config, shape = f"{row_format.value}-h{block}", f"{heads}x{num_splits}"
            cases.append(AotCase("mla_decode_split", config, _split_kernel, types, constants, shape=shape))
    merge = partials | {"out_ptr": "*bf16", "lse_ptr": "*fp32"}
    for num_splits in (1, 16, MAX_SPLITS):
        constants = {"HEADS": 16, "NUM_SPLITS": num_splits, "BLOCK_SPLITS": num_splits}
        cases.append(
            AotCase(
                "mla_decode_merge", "default", _merge_kernel, merge, constants, shape=f"{num_splits} splits"
            )
        )
    return tuple(cases)


AOT_CASES = _aot_cases()
