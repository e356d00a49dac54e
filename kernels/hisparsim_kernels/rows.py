# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rows in and out of pools: write new rows, read rows back.

    latent   [tokens, 512]     bf16 or float32, contiguous
    rope     [tokens, 64]      bf16 or float32, contiguous
    rows     [num_rows, 576] bf16 or [num_rows, 656] uint8 (`row_format`): a pool
    slots    [tokens]          int32, the row of the pool; -1 writes nothing (a padding token), reads zeros

Offsets are 64-bit: row x 1152 passes 2^31 at 1.9 million rows. `mirror` copies new rows to the host pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hisparsim_kernels import errors
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import find_config
from hisparsim_kernels.mla_tile import (
    FP8_ROW_BYTES,
    FP8_SCALES,
    LATENT,
    ROPE,
    WIDTH,
    load_bf16_rows,
    load_fp8_rows,
)
from hisparsim_kernels.registry import AotCase
from hisparsim_kernels.row_format import RowFormat, row_format_of


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    latent_ptr,
    rope_ptr,
    slots_ptr,
    rows_ptr,
    num_tokens,
    FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = (row >= 0)[:, None]
    column = tl.arange(0, LATENT)[None, :]
    rope_column = tl.arange(0, ROPE)[None, :]
    latent = tl.load(latent_ptr + token[:, None] * LATENT + column, mask=live, other=0.0)
    rope = tl.load(rope_ptr + token[:, None] * ROPE + rope_column, mask=live, other=0.0)
    if FP8:
        tiles = tl.reshape(latent.to(tl.float32), (BLOCK_TOKENS, FP8_SCALES, LATENT // FP8_SCALES))
        largest = tl.maximum(tl.max(tl.abs(tiles), 2), 1e-4)
        scale = tl.div_rn(largest, 448.0)
        if POWER_OF_TWO:
            # Round the float's exponent up: add all mantissa bits, then drop them.
            bits = scale.to(tl.int32, bitcast=True)
            scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        codes = tl.div_rn(tiles, tl.broadcast_to(scale[:, :, None], tiles.shape)).to(tl.float8e4nv)
        at = rows_ptr + row * FP8_ROW_BYTES
        codes_at = at.to(tl.pointer_type(tl.float8e4nv))[:, None] + column
        scales_at = (at + LATENT).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, FP8_SCALES)[None, :]
        rope_at = (at + LATENT + 4 * FP8_SCALES).to(tl.pointer_type(tl.bfloat16))[:, None] + rope_column
        tl.store(codes_at, tl.reshape(codes, (BLOCK_TOKENS, LATENT)), mask=live)
        tl.store(scales_at, scale, mask=live)
        tl.store(rope_at, rope.to(tl.bfloat16), mask=live)
    else:
        at = rows_ptr + row[:, None] * WIDTH
        tl.store(at + column, latent.to(tl.bfloat16), mask=live)
        tl.store(at + LATENT + rope_column, rope.to(tl.bfloat16), mask=live)


@triton.jit(do_not_specialize=["num_tokens"])
def _read_kernel(rows_ptr, slots_ptr, out_ptr, num_tokens, FP8: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    row = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    if FP8:
        latent, rope = load_fp8_rows(rows_ptr, row, row >= 0, BLOCK_TOKENS)
    else:
        latent, rope = load_bf16_rows(rows_ptr, row, row >= 0)
    at = out_ptr + token[:, None] * WIDTH
    tl.store(at + tl.arange(0, LATENT)[None, :], latent, mask=inside[:, None])
    tl.store(at + LATENT + tl.arange(0, ROPE)[None, :], rope, mask=inside[:, None])


def _check_slots(slots: torch.Tensor, tokens: int) -> None:
    errors.check_dtype("slots", slots, torch.int32)
    errors.check_shape("slots", slots, (tokens,))
    errors.check_contiguous("slots", slots)


def write_rows(
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    power_of_two_scales: bool = False,
) -> None:
    """Enqueue packing of new tokens into `rows[slots]`; a slot of -1 writes nothing. Other rows stay
    untouched.

    For fp8_ds_mla the scale of a tile is its largest magnitude / 448, rounded up to a power of two when
    `power_of_two_scales` (what FlashMLA's own tests store). Raises a `KernelInputError` for a bad argument.
    """
    row_format = row_format_of(rows)
    errors.check_shape("latent", latent, (None, LATENT.value))
    tokens = latent.shape[0]
    errors.check_shape("rope", rope, (tokens, ROPE.value))
    for name, tensor in (("latent", latent), ("rope", rope)):
        errors.check_dtype(name, tensor, torch.bfloat16, torch.float32)
        errors.check_contiguous(name, tensor)
    _check_slots(slots, tokens)
    device = errors.check_same_device(latent=latent, rope=rope, slots=slots, rows=rows)
    if tokens == 0:
        return
    config = find_config("rows", "write_rows", row_format.value, arch_of(device))
    _write_kernel[(triton.cdiv(tokens, config.meta["BLOCK_TOKENS"]),)](
        latent,
        rope,
        slots,
        rows,
        tokens,
        FP8=row_format is RowFormat.FP8_DS_MLA,
        POWER_OF_TWO=power_of_two_scales,
        **config.launch_arguments(),
    )


def read_rows(rows: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Enqueue unpacking of `rows[slots]` into `out` [tokens, 576] bf16; a slot of -1 gives a row of zeros."""
    row_format = row_format_of(rows)
    errors.check_dtype("out", out, torch.bfloat16)
    errors.check_shape("out", out, (None, WIDTH.value))
    errors.check_contiguous("out", out)
    _check_slots(slots, out.shape[0])
    device = errors.check_same_device(rows=rows, slots=slots, out=out)
    if out.shape[0] == 0:
        return
    config = find_config("rows", "read_rows", row_format.value, arch_of(device))
    grid = (triton.cdiv(out.shape[0], config.meta["BLOCK_TOKENS"]),)
    is_fp8 = row_format is RowFormat.FP8_DS_MLA
    _read_kernel[grid](rows, slots, out, out.shape[0], FP8=is_fp8, **config.launch_arguments())


_POINTERS = {
    "latent_ptr": "*bf16",
    "rope_ptr": "*bf16",
    "slots_ptr": "*i32",
    "num_tokens": "i32",
    "out_ptr": "*bf16",
}


def _aot_cases() -> tuple[AotCase, ...]:
    cases = []
    for row_format in RowFormat:
        fp8 = row_format is RowFormat.FP8_DS_MLA
        pool = {"rows_ptr": "*u8" if fp8 else "*bf16"}
        write_types = {
            name: _POINTERS[name] for name in ("latent_ptr", "rope_ptr", "slots_ptr", "num_tokens")
        } | pool
        constants = {"FP8": fp8, "POWER_OF_TWO": False}
        cases.append(AotCase("write_rows", row_format.value, _write_kernel, write_types, constants))
        read_types = {name: _POINTERS[name] for name in ("slots_ptr", "out_ptr", "num_tokens")} | pool
        cases.append(AotCase("read_rows", row_format.value, _read_kernel, read_types, {"FP8": fp8}))
    return tuple(cases)


AOT_CASES = _aot_cases()
