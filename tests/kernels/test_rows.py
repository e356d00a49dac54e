"""Row formats: packing and unpacking, writes to pools."""

from __future__ import annotations

import pytest
import torch

from hisparsim_kernels import errors
from hisparsim_kernels.references import rows as reference
from hisparsim_kernels.row_format import RowFormat
from hisparsim_kernels.rows import read_rows, write_rows

FORMATS = pytest.mark.parametrize("row_format", RowFormat, ids=lambda f: f.value)


def tokens_of(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 6, (count, 4), generator=generator).float()).repeat_interleave(
        128, 1
    )
    latent = torch.randn(count, 512, generator=generator) * spread
    return latent.to(dtype), torch.randn(count, 64, generator=generator).to(dtype)


def noise_pool(row_format: RowFormat, num_rows: int, seed: int) -> torch.Tensor:
    pool = row_format.empty_pool(num_rows)
    generator = torch.Generator().manual_seed(seed)
    pool.view(torch.uint8).copy_(torch.randint(0, 255, pool.view(torch.uint8).shape, generator=generator))
    return pool


def test_rows_have_the_bytes_that_the_formats_state() -> None:
    assert RowFormat.BF16.empty_pool(3).view(torch.uint8).shape == (3, 1152)
    assert RowFormat.FP8_DS_MLA.empty_pool(3).view(torch.uint8).shape == (3, 656)


@FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_written_rows_equal_the_reference_byte_for_byte_and_no_other_row_changes(
    row_format: RowFormat, power_of_two: bool, dtype: torch.dtype
) -> None:
    latent, rope = tokens_of(37, 1, dtype)
    latent[3] = 0.0
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(2))[:37].int()
    slots[5] = -1
    got = noise_pool(row_format, 90, 3)
    want = got.clone()
    write_rows(latent, rope, slots, got, power_of_two_scales=power_of_two)
    reference.write_rows(latent, rope, slots, want, power_of_two)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@FORMATS
def test_reading_gives_what_the_bytes_say_and_zeros_for_no_row(row_format: RowFormat) -> None:
    latent, rope = tokens_of(20, 4)
    pool = row_format.empty_pool(64)
    pool.view(torch.uint8).fill_(0xFF)
    slots = torch.arange(40, 60).int()
    pool[slots.long()] = reference.pack(latent, rope, row_format, power_of_two_scales=True)
    wanted = torch.cat([slots.flip(0), torch.tensor([-1])]).int()
    out = torch.full((21, 576), float("nan"), dtype=torch.bfloat16)
    read_rows(pool, wanted, out)
    assert torch.equal(out.double(), reference.read_rows(pool, wanted))


def test_fp8_rows_lose_at_most_one_part_in_sixteen_of_a_tiles_largest_value() -> None:
    latent, rope = tokens_of(16, 5)
    pool = RowFormat.FP8_DS_MLA.empty_pool(16)
    write_rows(latent, rope, torch.arange(16).int(), pool)
    back = reference.unpack(pool)
    tiles = latent.double().reshape(16, 4, 128)
    error = (back[:, :512].reshape(16, 4, 128) - tiles).abs()
    # e4m3 keeps 3 bits after the leading one: half a step is 1/16 of the value, or 2^-10 of the scale below.
    assert bool((error <= tiles.abs() / 16 + tiles.abs().amax(-1, keepdim=True) / 448 * 2.0**-10).all())
    assert torch.equal(back[:, 512:], rope.bfloat16().double())


def test_bytes_that_are_no_rows_are_refused() -> None:
    memory = torch.zeros(4 * 1152 + 16, dtype=torch.uint8)
    with pytest.raises(errors.StrideError, match="rows start 2 bytes into their storage"):
        RowFormat.BF16.rows_of(memory[2 : 2 + 4 * 1152].view(4, 1152))
    with pytest.raises(errors.StrideError, match="must be contiguous"):
        RowFormat.BF16.rows_of(torch.zeros(4, 2304, dtype=torch.uint8)[:, ::2])


def test_invalid_calls_name_the_value() -> None:
    latent, rope = tokens_of(4, 6)
    slots = torch.arange(4).int()
    pool = RowFormat.BF16.empty_pool(8)
    with pytest.raises(errors.DtypeError, match=r"latent has dtype torch\.float16"):
        write_rows(latent.half(), rope, slots, pool)
    with pytest.raises(errors.ShapeError, match=r"rope has shape \(4, 32\)"):
        write_rows(latent, rope[:, :32].contiguous(), slots, pool)
    with pytest.raises(errors.ShapeError, match=r"slots has shape \(3,\)"):
        write_rows(latent, rope, slots[:3], pool)
    with pytest.raises(errors.StrideError, match="rows of shape"):
        write_rows(latent, rope, slots, torch.empty(8, 1152, dtype=torch.bfloat16)[:, ::2])
