"""Grouped expert GEMM against the float64 reference: ragged and empty groups, padding rows, block scales."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hisparsim_kernels import errors
from hisparsim_kernels.configs import find_config
from hisparsim_kernels.grouped_gemm import gemm_config, grouped_gemm, invariant_config
from hisparsim_kernels.references import grouped_gemm as reference


@dataclass(frozen=True)
class Case:
    name: str
    sizes: tuple[int, ...] = (5, 0, 17, 2)
    padding: int = 0
    n: int = 256
    k: int = 256


CASES = (
    Case("ragged"),
    Case("padding-rows", padding=40),
    Case("all-groups-empty", sizes=(0, 0, 0), padding=9),
    Case("first-and-last-empty", sizes=(0, 33, 0)),
    Case("one-expert", sizes=(20,)),
    Case("experts-not-a-power-of-two", sizes=(1, 2, 3, 4, 5)),
    Case("exact-tiles", sizes=(16, 32, 16)),
    Case("n-not-a-tile", n=208),
    Case("prefill", sizes=(130, 3, 190), n=128, k=128),
    Case("middle", sizes=(40, 60), padding=3, n=128),
)


def inputs_of(case: Case, fp8: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(case.sizes) + case.padding
    x = torch.randn(rows, case.k, generator=generator)
    weight = torch.randn(len(case.sizes), case.n, case.k, generator=generator) * 0.1
    weight[:, :, : case.k // 2] *= 8  # tiles differ in scale
    offsets = torch.tensor([0, *torch.tensor(case.sizes).cumsum(0).tolist()], dtype=torch.int32)
    if not fp8:
        return {"x": x.bfloat16(), "weight": weight.bfloat16(), "offsets": offsets}
    x8, x_scale = reference.quantise_rows(x)
    w8, w_scale = reference.quantise_weight(weight)
    return {"x": x8, "weight": w8, "offsets": offsets, "x_scale": x_scale, "w_scale": w_scale}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_equals_the_reference_and_padding_rows_become_zero(case: Case, fp8: bool) -> None:
    inputs = inputs_of(case, fp8)
    out = torch.full((inputs["x"].shape[0], case.n), float("nan"))
    grouped_gemm(**inputs, out=out)
    want = reference.grouped_gemm(**inputs)
    assert torch.equal(out[sum(case.sizes) :], torch.zeros(case.padding, case.n))
    assert (out.double() - want).norm().item() <= 1e-5 * max(1e-9, want.norm().item())


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 500, 600, 2**31 - 1),
        (-900, -5, -3, -1),
        (0, 20, 3, 24),
        (90, 80, 70, 60),
        (2**31 - 1,) * 4,
        (-(2**31),) * 4,
    ],
    ids=str,
)
def test_offsets_that_are_no_offsets_lead_to_no_write_outside_the_output(offsets: tuple[int, ...]) -> None:
    inputs = inputs_of(Case("calls", sizes=(5, 17, 2), n=128), fp8=False)
    memory = torch.full((24 * 128 * 3,), 7.0)
    inputs["offsets"] = torch.tensor(offsets, dtype=torch.int32)
    grouped_gemm(**inputs, out=memory[24 * 128 : 2 * 24 * 128].view(24, 128))
    assert bool((memory[: 24 * 128] == 7).all()) and bool((memory[2 * 24 * 128 :] == 7).all())


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_row_gets_the_same_bits_in_any_batch_under_the_invariant_configuration(fp8: bool) -> None:
    config = invariant_config(fp8, "sm_90")
    inputs = inputs_of(Case("invariant", sizes=(70, 9), n=128), fp8)
    whole = torch.empty(79, 128)
    grouped_gemm(**inputs, out=whole, config=config)
    alone = {**inputs, "offsets": torch.tensor([0, 1, 1], dtype=torch.int32)}
    for row in (0, 33, 69):
        alone["x"] = inputs["x"][row : row + 1]
        if fp8:
            alone["x_scale"] = inputs["x_scale"][row : row + 1]
        out = torch.empty(1, 128)
        grouped_gemm(**alone, out=out, config=config)
        assert torch.equal(out[0], whole[row])


def test_the_default_configuration_follows_the_mean_rows_an_expert() -> None:
    names = [gemm_config(True, rows, 256, "sm_90").name for rows in (1, 2048, 8192, 65536)]
    assert names == ["fp8-m16", "fp8-m16", "fp8-m64", "fp8-m128"]
    assert find_config("grouped_gemm", "grouped_gemm", "bf16-m16").meta["BLOCK_M"] == 16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(24, 256)}, errors.DtypeError, r"x has dtype torch\.float32"),
        ({"weight": torch.zeros(4, 256, 256)}, errors.DtypeError, r"weight has dtype"),
        ({"x": torch.zeros(24, 128).bfloat16()}, errors.ShapeError, r"\(24, 128\)"),
        ({"weight": torch.zeros(4, 250, 256).bfloat16()}, errors.ShapeError, r"\(4, 250, 256\)"),
        ({"weight": torch.zeros(4, 256, 256).bfloat16().transpose(1, 2)}, errors.StrideError, r"weight"),
        ({"offsets": torch.zeros(4, dtype=torch.int32)}, errors.ShapeError, r"offsets has shape \(4,\)"),
        ({"offsets": torch.zeros(5, dtype=torch.int64)}, errors.DtypeError, r"int64"),
        ({"x_scale": torch.zeros(24, 2)}, errors.DtypeError, r"bf16 takes neither"),
    ],
)
def test_an_invalid_call_is_refused_with_the_value(
    changes: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    inputs = inputs_of(Case("calls"), fp8=False) | changes
    with pytest.raises(error, match=message):
        grouped_gemm(**inputs, out=torch.empty(24, 256))


def test_e4m3_without_scales_is_refused() -> None:
    inputs = inputs_of(Case("calls"), fp8=True)
    with pytest.raises(errors.DtypeError, match="e4m3 needs x_scale and w_scale"):
        grouped_gemm(inputs["x"], inputs["weight"], inputs["offsets"], torch.empty(24, 256))
