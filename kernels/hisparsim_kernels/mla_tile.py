# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The inner loop that sparse MLA decode and prefill share: attention of a block of heads over gathered rows.

For head h and slot j with row k_j = (latent c_j of 512, rope r_j of 64):
    s_hj = scale * (q_h[:512] . c_j + q_h[512:] . r_j);   o_h = sum_j softmax(s_h)_j c_j
Scores and the running softmax are float32 in base 2; probabilities are rounded to bf16 for the second
product.

Rows are read at `base + row * row_bytes` with 64-bit offsets. A slot of -1, or at or past the valid count, is
not read at all (its lanes load zeros), so that NaN in unused rows cannot leak. A block whose slots are all
invalid leaves the running maximum at -inf; the exponent is then taken against 0, which gives zeros and not
NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LATENT: tl.constexpr = tl.constexpr(512)
ROPE: tl.constexpr = tl.constexpr(64)
WIDTH: tl.constexpr = tl.constexpr(576)
FP8_ROW_BYTES: tl.constexpr = tl.constexpr(656)
FP8_SCALES: tl.constexpr = tl.constexpr(4)


@triton.jit
def load_bf16_rows(rows_ptr, row, valid):
    """Row ids [N] int64 -> latent [N, 512] bf16 and rope [N, 64] bf16; invalid rows are zeros and not
    read."""
    at = rows_ptr + row * WIDTH
    latent = tl.load(at[:, None] + tl.arange(0, LATENT)[None, :], mask=valid[:, None], other=0.0)
    rope = tl.load(at[:, None] + LATENT + tl.arange(0, ROPE)[None, :], mask=valid[:, None], other=0.0)
    return latent, rope


@triton.jit
def load_fp8_rows(rows_ptr, row, valid, BLOCK_ROWS: tl.constexpr):
    """Row ids [N] int64 of 656-byte rows -> dequantised latent [N, 512] bf16 and rope [N, 64] bf16.

    The four scales are loaded once a row and broadcast over their 128 columns through a 3-D view: loading
    them as an [N, 512] gather spills.
    """
    at = rows_ptr + row * FP8_ROW_BYTES
    codes_at = at.to(tl.pointer_type(tl.float8e4nv))[:, None] + tl.arange(0, LATENT)[None, :]
    scales_at = (at + LATENT).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, FP8_SCALES)[None, :]
    rope_at = (at + LATENT + 4 * FP8_SCALES).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, ROPE)[
        None, :
    ]
    codes = tl.load(codes_at, mask=valid[:, None], other=0.0)
    scales = tl.load(scales_at, mask=valid[:, None], other=0.0)
    rope = tl.load(rope_at, mask=valid[:, None], other=0.0)
    tiles = tl.reshape(codes.to(tl.float32), (BLOCK_ROWS, FP8_SCALES, LATENT // FP8_SCALES))
    latent = tl.reshape(tiles * scales[:, :, None], (BLOCK_ROWS, LATENT)).to(tl.bfloat16)
    return latent, rope


@triton.jit
def attend_slots(
    q_ptr,  # bf16, at this token's [HEADS, 576]
    rows_ptr,  # bf16 rows of 576, or uint8 rows of 656
    slots_ptr,  # int32, at this token's slots
    first,
    last,  # slots [first, last) are attended
    head,  # [BLOCK_HEADS] head numbers
    scale_log2,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Unnormalised output [BLOCK_HEADS, 512], maximum (base 2) and sum [BLOCK_HEADS] over the slots."""
    # Heads past HEADS repeat the last one; their results are not stored. No mask has to stay in registers.
    q_at = q_ptr + tl.minimum(head, HEADS - 1)[:, None] * WIDTH
    q_latent = tl.load(q_at + tl.arange(0, LATENT)[None, :])
    q_rope = tl.load(q_at + LATENT + tl.arange(0, ROPE)[None, :])
    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    out = tl.zeros((BLOCK_HEADS, LATENT), tl.float32)
    for start in range(first, last, BLOCK_ROWS):
        slot = start + tl.arange(0, BLOCK_ROWS)
        row = tl.load(slots_ptr + slot, mask=slot < last, other=-1).to(tl.int64)
        valid = row >= 0
        if FP8:
            latent, rope = load_fp8_rows(rows_ptr, row, valid, BLOCK_ROWS)
        else:
            latent, rope = load_bf16_rows(rows_ptr, row, valid)
        score = tl.dot(q_latent, tl.trans(latent))
        score = tl.dot(q_rope, tl.trans(rope), score)
        score = tl.where(valid[None, :], score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        against = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - against[:, None])
        shrink = tl.exp2(top - against)
        total = total * shrink + tl.sum(weight, 1)
        out = tl.dot(weight.to(tl.bfloat16), latent, out * shrink[:, None])
        top = new_top
    return out, top, total
