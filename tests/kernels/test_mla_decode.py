"""Sparse MLA decode against the float64 reference, over the cases that hurt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from hisparsim_kernels import errors
from hisparsim_kernels.compare import assert_attention_close
from hisparsim_kernels.mla_decode import (
    DecodeScratch,
    decode_config,
    plan_splits,
    sparse_mla_decode,
)
from hisparsim_kernels.mla_invariant import BATCH_INVARIANT_SPLITS
from hisparsim_kernels.references import mla as reference
from hisparsim_kernels.references import rows as rows_reference
from hisparsim_kernels.row_format import RowFormat

SCALE = 1 / math.sqrt(192)
NUM_ROWS = 1500


def make_pool(
    row_format: RowFormat, used: torch.Tensor, generator: torch.Generator, power_of_two_scales: bool = True
) -> torch.Tensor:
    """A pool whose rows are NaN (0xFF bytes) except the used ones. With power-of-two scales a dequantised
    value is exact in bf16, so that the reference sees what the kernel multiplies."""
    pool = row_format.empty_pool(NUM_ROWS)
    pool.view(torch.uint8).fill_(0xFF)
    latent = torch.randn(len(used), 512, generator=generator) / 2
    rope = torch.randn(len(used), 64, generator=generator)
    pool[used] = rows_reference.pack(latent, rope, row_format, power_of_two_scales)
    return pool


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int = 2
    heads: int = 16
    top_k: int = 256
    num_splits: int = 4
    invalid: float = 0.1
    counts: tuple[int, ...] | None = None
    leading_invalid: int = 0
    out_dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("heads-8", heads=8),
    Case("heads-16", out_dtype=torch.float32),
    Case("heads-5", heads=5, top_k=64),
    Case("heads-32", heads=32),
    Case("heads-64", heads=64, top_k=128),
    Case("heads-128", tokens=1, heads=128, top_k=128, num_splits=2),
    Case("one-split", num_splits=1),
    Case("more-splits-than-blocks", top_k=64, num_splits=16),
    Case("splits-not-a-power-of-two", num_splits=3),
    Case("top-k-2048", tokens=1, top_k=2048, num_splits=16),
    Case("top-k-61", top_k=61),
    Case("one-row", top_k=64, counts=(1, 1), invalid=0.0),
    Case("length-zero", counts=(0, 200)),
    Case("all-invalid", invalid=1.0),
    Case("all-invalid-in-one-token", counts=(0, 0)),
    Case("leading-invalid-block", leading_invalid=160),
    Case("leading-invalid-block-one-split", leading_invalid=160, num_splits=1),
    Case("fewer-than-k", counts=(133, 70)),
    Case("count-past-top-k", counts=(100000, 256)),
    Case("half-invalid", invalid=0.5),
)


def run_case(case: Case, row_format: RowFormat, power_of_two_scales: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(case.name) * 97 + case.heads)
    used = torch.randperm(NUM_ROWS, generator=generator)[: NUM_ROWS - 200]
    pool = make_pool(row_format, used, generator, power_of_two_scales)
    slots = used[torch.randint(len(used), (case.tokens, case.top_k), generator=generator)].int()
    slots[torch.rand(slots.shape, generator=generator) < case.invalid] = -1
    slots[:, : case.leading_invalid] = -1
    counts = torch.tensor(case.counts or [case.top_k] * case.tokens, dtype=torch.int32)
    # Slots past the count name rows full of NaN: reading them would show.
    poisoned = next(row for row in range(NUM_ROWS) if row not in set(used.tolist()))
    for token in range(case.tokens):
        slots[token, max(0, int(counts[token])) :] = poisoned
    q = (torch.randn(case.tokens, case.heads, 576, generator=generator) / 2).bfloat16()
    out = torch.full((case.tokens, case.heads, 512), float("nan"), dtype=case.out_dtype)
    lse = torch.full((case.tokens, case.heads), float("nan"))
    scratch = DecodeScratch.create(case.tokens, case.heads, case.num_splits, "cpu")
    scratch.partial.fill_(float("nan"))
    scratch.stats.fill_(float("nan"))
    sparse_mla_decode(
        q, pool, slots, counts, scale=SCALE, out=out, lse=lse, scratch=scratch, num_splits=case.num_splits
    )
    want_out, want_lse = reference.sparse_mla(q, pool, slots, counts, SCALE)
    return out, lse, want_out, want_lse


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda f: f.value)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_equals_the_reference_and_never_reads_an_unused_row(case: Case, row_format: RowFormat) -> None:
    out, lse, want_out, want_lse = run_case(case, row_format)
    assert_attention_close(out, lse, want_out, want_lse)


def test_scales_that_are_no_powers_of_two_cost_one_bf16_rounding_of_the_latent() -> None:
    out, lse, want_out, want_lse = run_case(CASES[1], RowFormat.FP8_DS_MLA, power_of_two_scales=False)
    assert (out.double() - want_out).abs().max().item() < 1e-2
    assert (lse.double() - want_lse).abs().max().item() < 5e-3


def small_call(**changes: object) -> None:
    arguments: dict[str, object] = {
        "q": torch.randn(2, 16, 576).bfloat16(),
        "rows": torch.randn(64, 576).bfloat16(),
        "slots": torch.zeros(2, 32, dtype=torch.int32),
        "counts": torch.full((2,), 32, dtype=torch.int32),
        "scale": SCALE,
        "out": torch.empty(2, 16, 512, dtype=torch.bfloat16),
        "lse": torch.empty(2, 16),
        "scratch": DecodeScratch.create(2, 16, 4, "cpu"),
        "num_splits": 4,
    }
    arguments.update(changes)
    sparse_mla_decode(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(2, 16, 576)}, errors.DtypeError, r"q has dtype torch\.float32"),
        ({"q": torch.randn(2, 16, 512).bfloat16()}, errors.ShapeError, r"\(2, 16, 512\)"),
        ({"q": torch.randn(16, 2, 576).bfloat16().transpose(0, 1)}, errors.StrideError, r"contiguous"),
        ({"q": torch.randn(2, 129, 576).bfloat16()}, errors.RangeError, r"heads is 129"),
        ({"rows": torch.randn(64, 576)}, errors.DtypeError, r"rows has dtype torch\.float32"),
        ({"rows": torch.zeros(64, 576, dtype=torch.uint8)}, errors.ShapeError, r"656"),
        ({"rows": torch.randn(64, 1152).bfloat16()[:, ::2]}, errors.StrideError, r"strides \(1152, 2\)"),
        ({"slots": torch.zeros(2, 32, dtype=torch.int64)}, errors.DtypeError, r"int64"),
        ({"slots": torch.zeros(3, 32, dtype=torch.int32)}, errors.ShapeError, r"\(3, 32\)"),
        ({"counts": torch.zeros(4, dtype=torch.int32)[::2]}, errors.StrideError, r"counts"),
        ({"lse": torch.empty(2, 16, device="meta")}, errors.DeviceError, r"lse on meta"),
        ({"num_splits": 33}, errors.RangeError, r"num_splits is 33"),
        ({"num_splits": 2.5}, errors.RangeError, r"num_splits is 2\.5; it must be a whole number"),
        ({"scale": torch.tensor(0.1)}, errors.RangeError, r"scale is tensor\(0\.1000\)"),
        ({"scale": float("nan")}, errors.RangeError, r"scale is nan; it must be a finite number"),
        ({"num_splits": 8}, errors.RangeError, r"scratch holds 128"),
    ],
)
def test_an_invalid_call_names_the_argument_and_its_value(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        small_call(**changes)


def test_a_token_gets_the_same_bits_alone_and_in_any_batch_with_fixed_splits() -> None:
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(600, 576, generator=generator).bfloat16()
    q = torch.randn(5, 8, 576, generator=generator).bfloat16()
    slots = torch.randint(-1, 600, (5, 256), generator=generator).int()
    counts = torch.tensor([256, 10, 0, 256, 130], dtype=torch.int32)

    def attend(chosen: list[int]) -> torch.Tensor:
        out = torch.empty(len(chosen), 8, 512)
        lse = torch.empty(len(chosen), 8)
        scratch = DecodeScratch.create(len(chosen), 8, BATCH_INVARIANT_SPLITS, "cpu")
        sparse_mla_decode(
            q[chosen].contiguous(),
            pool,
            slots[chosen].contiguous(),
            counts[chosen].contiguous(),
            scale=SCALE,
            out=out,
            lse=lse,
            scratch=scratch,
            num_splits=BATCH_INVARIANT_SPLITS,
        )
        return out

    whole = attend([0, 1, 2, 3, 4])
    for token in range(5):
        assert torch.equal(attend([token])[0], whole[token])
    assert torch.equal(attend([4, 2, 0]), whole[[4, 2, 0]])


def test_the_bits_do_not_depend_on_where_the_rows_lie() -> None:
    generator = torch.Generator().manual_seed(6)
    pool = torch.randn(300, 576, generator=generator).bfloat16()
    q = torch.randn(1, 16, 576, generator=generator).bfloat16()
    slots = torch.randperm(300, generator=generator)[:256].int()[None]
    counts = torch.tensor([256], dtype=torch.int32)
    moved_to = torch.randperm(300, generator=generator)
    moved = torch.empty_like(pool)
    moved[moved_to] = pool
    results = []
    for rows, chosen in ((pool, slots), (moved, moved_to[slots.long()].int())):
        out, lse = torch.empty(1, 16, 512), torch.empty(1, 16)
        scratch = DecodeScratch.create(1, 16, 4, "cpu")
        sparse_mla_decode(
            q, rows, chosen, counts, scale=SCALE, out=out, lse=lse, scratch=scratch, num_splits=4
        )
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_corrupt_row_that_is_selected_shows_in_the_output(num_splits: int) -> None:
    """NaN must not pass for a split, or a token, without a valid slot."""
    pool = torch.zeros(256, 576).bfloat16()
    pool[200] = float("nan")
    q, slots = torch.ones(2, 8, 576).bfloat16(), torch.arange(256).int().repeat(2, 1)
    slots[1, 200] = -1
    counts, out, lse = torch.tensor([256, 256], dtype=torch.int32), torch.empty(2, 8, 512), torch.empty(2, 8)
    scratch = DecodeScratch.create(2, 8, num_splits, "cpu")
    sparse_mla_decode(
        q, pool, slots, counts, scale=SCALE, out=out, lse=lse, scratch=scratch, num_splits=num_splits
    )
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].eq(0).all() and torch.allclose(lse[1], torch.full((8,), math.log(255)))


@pytest.mark.parametrize("tokens", [1, 8, 132, 1024])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_planned_splits_fill_the_multiprocessors_at_most_once(tokens: int, heads: int) -> None:
    config = decode_config(RowFormat.BF16, heads, "sm_90")
    splits = plan_splits(tokens, heads, 2048, config)
    programs = tokens * splits * -(-heads // config.meta["BLOCK_HEADS"])
    assert splits == 1 or programs <= 132
    assert 1 <= splits <= 2048 // config.meta["BLOCK_ROWS"]
