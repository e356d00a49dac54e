# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Sparse MLA prefill: a chunk of tokens, each over its own selected rows, one program a token and block of
heads.

Shapes are those of `mla_decode`, with `tokens` the tokens of the chunk. A chunk has programs enough without
split-K, so there are no partial results and no scratch. A token that sees fewer rows than `top_k` has a
smaller count, and its program does that much less.

Decode without splits (a batch that fills the GPU by itself) is this kernel too. `mla_invariant` has the form
of prefill that gives the bits of split decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.mla_arguments import check_attention_arguments, head_block
from hisparsim_kernels.mla_tile import LATENT, WIDTH, attend_slots
from hisparsim_kernels.registry import AotCase
from hisparsim_kernels.row_format import RowFormat


@triton.jit
def _prefill_kernel(
    q_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    out, top, total = attend_slots(
        q_ptr + token * HEADS * WIDTH,
        rows_ptr,
        slots_ptr + token * TOP_K,
        0,
        tl.minimum(tl.load(counts_ptr + token), TOP_K),
        head,
        scale_log2,
        HEADS,
        BLOCK_HEADS,
        BLOCK_ROWS,
        FP8,
    )
    some = total != 0.0  # NaN counts: a corrupt row must show in the output
    divisor = tl.where(some, total, 1.0)
    ln2 = 0.6931471805599453
    natural = tl.where(some, (top + tl.log2(divisor)) * ln2, float("inf"))
    tl.store(lse_ptr + token * HEADS + head, natural, mask=head < HEADS)
    out_at = out_ptr + (token * HEADS + head)[:, None] * LATENT + tl.arange(0, LATENT)[None, :]
    tl.store(out_at, (out / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])


def prefill_config(row_format: RowFormat, heads: int, arch: str) -> LaunchConfig:
    """The default configuration: the smallest head block that covers `heads`, 64 at most."""
    return find_config("mla_prefill", "mla_prefill", f"{row_format.value}-h{head_block(heads)}", arch)


def sparse_mla_prefill(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Enqueue attention of a chunk's tokens over the rows that `slots` names, writing all of `out` and `lse`.

    Causality is the selection's: a token's slots name only rows it may see. Raises a `KernelInputError`
    before anything is enqueued.
    """
    row_format, device = check_attention_arguments(q, rows, slots, counts, out, lse, scale)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    if config is None:
        config = prefill_config(row_format, heads, arch_of(device))
    _prefill_kernel[(tokens, triton.cdiv(heads, config.meta["BLOCK_HEADS"]))](
        q,
        rows,
        slots,
        counts,
        out,
        lse,
        scale * 1.4426950408889634,
        HEADS=heads,
        TOP_K=slots.shape[1],
        FP8=row_format is RowFormat.FP8_DS_MLA,
        **config.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    types = {
        "q_ptr": "*bf16",
        "slots_ptr": "*i32",
        "counts_ptr": "*i32",
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
    }
    cases = []
    for row_format in RowFormat:
        fp8 = row_format is RowFormat.FP8_DS_MLA
        rows = {"rows_ptr": "*u8" if fp8 else "*bf16", "scale_log2": "fp32"}
        for heads in (8, 16, 32, 64, 128):
            constants = {"HEADS": heads, "TOP_K": 2048, "FP8": fp8}
            config = f"{row_format.value}-h{head_block(heads)}"
            cases.append(
                AotCase(
                    "mla_prefill", config, _prefill_kernel, types | rows, constants, shape=f"{heads} heads"
                )
            )
    return tuple(cases)


AOT_CASES = _aot_cases()
