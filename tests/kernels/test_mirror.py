"""The mirror of new rows to the host pool: exact copies, nothing else touched, gather brings them back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_kernels import errors
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references import mirror as reference

LAYOUTS = {
    "fp8": PageLayout.of_groups(656, (2, 3), indexer_page_bytes=0, page_rows=8),
    "bf16": PageLayout.of_groups(1152, (1, 4), page_rows=8),
}


def bytes_of(blocks: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=generator)


def flat_rows(layout: PageLayout, blocks: int, count: int, seed: int) -> torch.Tensor:
    """Distinct flat pool rows of first layers."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(blocks * layout.page_rows, generator=generator)[:count]
    return (place // layout.page_rows * layout.rows_per_block + place % layout.page_rows).int()


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    group=st.integers(0, 1),
    count=st.integers(0, 45),
    seed=st.integers(0, 99),
)
def test_mirrored_rows_are_copies_and_every_other_host_byte_stays(
    name: str, group: int, count: int, seed: int
) -> None:
    layout = LAYOUTS[name]
    pool, host = bytes_of(6, layout.block_bytes, seed), bytes_of(7, layout.host_block_bytes, seed + 1)
    pool_rows = flat_rows(layout, 6, 40, seed)
    generator = torch.Generator().manual_seed(seed)
    host_rows = torch.randperm(7 * layout.page_rows, generator=generator)[:40].int()
    pool_rows[torch.rand(40, generator=generator) < 0.1] = -1
    host_rows[torch.rand(40, generator=generator) < 0.1] = -1
    want = host.clone()
    reference.mirror_rows(pool, want, pool_rows, host_rows, min(count, 40), layout, group)
    mirror_rows(
        pool, host, pool_rows, host_rows, torch.tensor([count], dtype=torch.int32), layout, group=group
    )
    assert torch.equal(host, want)


def test_a_mirrored_row_comes_back_by_gather_through_an_address() -> None:
    layout = LAYOUTS["fp8"]
    pool, host = bytes_of(6, layout.block_bytes, 1), bytes_of(7, layout.host_block_bytes, 2)
    rows = flat_rows(layout, 3, 20, 3)
    hot = rows + 3 * layout.rows_per_block
    host_rows = torch.arange(20, dtype=torch.int32) * 2
    count = torch.tensor([20], dtype=torch.int32)
    mirror_rows(pool, host.data_ptr(), rows, host_rows, count, layout, group=1)
    gather_rows(host, pool, host_rows, hot, count, layout, group=1)
    for layer in range(3):
        values = layout.layer_rows(pool, layer)
        assert torch.equal(values[hot.long()], values[rows.long()])


def test_invalid_calls_name_the_value() -> None:
    layout = LAYOUTS["bf16"]
    pool, host = bytes_of(2, layout.block_bytes, 1), bytes_of(2, layout.host_block_bytes, 2)
    rows = torch.zeros(4, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(errors.RangeError, match="group is 2"):
        mirror_rows(pool, host, rows, rows, one, layout, group=2)
    with pytest.raises(errors.RangeError, match="num_layers is 3"):
        mirror_rows(pool, host, rows, rows, one, layout, group=1, first_layer=2, num_layers=3)
    with pytest.raises(errors.ShapeError, match=r"host_rows has shape \(3,\)"):
        mirror_rows(pool, host, rows, rows[:3], one, layout, group=0)
    with pytest.raises(errors.DtypeError, match="int64"):
        mirror_rows(pool, host, rows.long(), rows, one, layout, group=0)
    with pytest.raises(errors.RangeError, match="host address is -16"):
        mirror_rows(pool, -16, rows, rows, one, layout, group=0)
