"""Whole pages both ways, prefill staging, and the layout of pages in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_kernels.configs import LaunchConfig
from hisparsim_kernels.errors import DeviceError, DtypeError, RangeError, ShapeError, StrideError
from hisparsim_kernels.interpreter import permuted_programs
from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
from hisparsim_kernels.references.gather import copy_page_reference, host_row, pool_row
from hisparsim_kernels.staging import MissingPageError, plan_staging, staged_rows

LAYOUT = PageLayout.of_groups(656, (2, 4, 1), page_rows=4)
TABLES = GroupTables.of(LAYOUT, "cpu")
COPY = LaunchConfig("copy_pages", "test", 4, 1, {"CHUNKS": 256})
SMALL_STAGE = LaunchConfig("stage_pages", "test", 4, 1, {"CHUNKS": 64})


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("row_bytes", "group_sizes", "block_bytes", "host_block_bytes"),
    [
        (576, (2, *[4] * 19), 184_320, 2_875_392),
        (656, (2, *[4] * 19), 209_920, 3_276_800),
        (1152, (2, *[4] * 19), 294_912, 5_750_784),
    ],
)
def test_blocks_have_the_published_sizes(
    row_bytes: int, group_sizes: tuple[int, ...], block_bytes: int, host_block_bytes: int
) -> None:
    """78 layers, a 177,408-byte indexer page, 64 rows a page: vLLM 0.33's layout."""
    layout = PageLayout.of_groups(row_bytes, group_sizes, indexer_page_bytes=177_408)
    assert (layout.block_bytes, layout.num_layers) == (block_bytes, 78)
    assert layout.host_block_bytes == host_block_bytes
    assert layout.first_layers[:4] == (0, 2, 6, 10)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"row_bytes": 100}, StrideError, "row_bytes is 100"),
        ({"row_bytes": 0}, RangeError, "row_bytes is 0"),
        ({"group_layers": ()}, RangeError, "group_layers"),
        ({"group_layers": (5,)}, RangeError, "largest group has 40960"),
        ({"block_bytes": 8192 + 16}, StrideError, "8208"),
        ({"host_block_bytes": 8192}, RangeError, "all layers have 24576"),
        ({"page_rows": 0}, RangeError, "page_rows is 0"),
    ],
)
def test_an_impossible_layout_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good: dict[str, Any] = {
        "row_bytes": 128, "group_layers": (2, 1), "block_bytes": 16384, "host_block_bytes": 24576,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        PageLayout(**(good | change))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((656, ()), RangeError, r"group_layers is \(\)"),
        ((0, (1,)), RangeError, "row_bytes is 0"),
        ((656, (1, 0)), RangeError, r"group_layers is \(1, 0\)"),
    ],
)
def test_groups_that_make_no_layout_are_refused(
    arguments: tuple[int, tuple[int, ...]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        PageLayout.of_groups(*arguments)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda pool: pool.view(torch.int16), DtypeError, "int16"),
        (lambda pool: pool[:, :100], ShapeError, "100"),
        (lambda pool: pool.T.contiguous().T, StrideError, "contiguous"),
    ],
)
def test_a_pool_that_is_no_bytes_of_blocks_has_no_layer_rows(
    change: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LAYOUT.layer_rows(change(noise(2, LAYOUT.block_bytes)), 0)


@pytest.mark.parametrize("as_address", [False, True], ids=["tensor", "address"])
@pytest.mark.parametrize("direction", list(Direction))
def test_pages_of_all_groups_arrive_and_nothing_else_changes(direction: Direction, as_address: bool) -> None:
    host, pool = noise(5, LAYOUT.host_block_bytes), noise(9, LAYOUT.block_bytes, seed=2)
    entries = [(8, 4, 1), (0, 0, 0), (3, 4, 2), (5, 2, 1), (-1, 3, 1), (2, -1, 0)]  # the last two are padding
    want_host, want_pool = host.clone(), pool.clone()
    for block, host_block, group in entries[:4]:
        copy_page_reference(
            want_host, want_pool, block, host_block, LAYOUT, group, to_host=direction is Direction.TO_HOST
        )
    blocks, host_blocks, groups = (i32(*column, 2**30) for column in zip(*entries, strict=True))
    copy_pages(
        host.data_ptr() if as_address else host, pool, blocks, host_blocks, groups, i32(6), LAYOUT, TABLES,
        direction,
        num_programs=3, config=COPY,
    )  # fmt: skip
    assert torch.equal(pool, want_pool)
    assert torch.equal(host, want_host)


@settings(max_examples=8, deadline=None)
@given(
    row_bytes=st.integers(1, 50).map(lambda n: 16 * n),
    page_rows=st.sampled_from([1, 8, 61]),
    groups=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_page_written_back_and_restored_elsewhere_is_the_same(
    row_bytes: int, page_rows: int, groups: list[int], seed: int
) -> None:
    layout = PageLayout.of_groups(row_bytes, groups, page_rows=page_rows)
    tables, count = GroupTables.of(layout, "cpu"), len(groups)
    host, pool = (
        noise(3, layout.host_block_bytes, seed=seed),
        noise(2 * count, layout.block_bytes, seed=seed + 1),
    )
    before = pool.clone()
    numbers = torch.arange(count, dtype=torch.int32)
    block = torch.full((count,), 1, dtype=torch.int32)
    with permuted_programs(seed):
        copy_pages(
            host, pool, numbers, block, numbers, i32(count), layout, tables, Direction.TO_HOST,
            num_programs=2, config=COPY,
        )  # fmt: skip
        copy_pages(
            host, pool, numbers + count, block, numbers, i32(count), layout, tables, Direction.TO_GPU,
            num_programs=2, config=COPY,
        )  # fmt: skip
    for group, layers in enumerate(groups):
        size = layers * layout.page_bytes
        assert torch.equal(pool[count + group, :size], before[group, :size])
        assert torch.equal(pool[count + group, size:], before[count + group, size:])
    assert torch.equal(pool[:count], before[:count])


def test_staging_takes_each_distinct_page_once_and_prefers_the_gpu() -> None:
    resident = np.array([[-1, 5, -1, 8], [-1, -1, 6, -1]], dtype=np.int32)
    host = np.array([[2, 3, 4, -1], [2, 3, 4, 7]], dtype=np.int32)  # a shared prefix of three pages
    plan = plan_staging(resident, host, [4, 3])
    assert plan.host_blocks.tolist() == [2, 3, 4, -1]
    assert plan.blocks.tolist() == [-1, 5, 6, 8]
    assert plan.staged_pages.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]
    assert (plan.num_pages, plan.num_host_pages) == (4, 1)


def test_staging_an_unreadable_page_names_it() -> None:
    nowhere = np.full((2, 2), -1, dtype=np.int32)
    with pytest.raises(MissingPageError, match="page 1 of batch entry 0"):
        plan_staging(np.array([[4, -1]], dtype=np.int32), nowhere[:1], [2])
    with pytest.raises(RangeError, match="num_pages is 3"):
        plan_staging(nowhere, nowhere, [0, 3])


@pytest.mark.parametrize(
    ("resident", "host", "num_pages", "error", "words"),
    [
        ((1, 2), (2, 2), [1, 1], ShapeError, r"resident_blocks has shape \(1, 2\)"),
        ((2, 1), (2, 2), [2, 2], ShapeError, r"resident_blocks has shape \(2, 1\)"),
        ((2, 2), (2, 2), [1], ShapeError, "the 1 requests of num_pages"),
        ((2,), (2,), [1, 1], ShapeError, r"has shape \(2,\)"),
    ],
)
def test_staging_tables_that_do_not_match_are_refused(
    resident: tuple[int, ...], host: tuple[int, ...], num_pages: list[int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_staging(np.zeros(resident, dtype=np.int32), np.zeros(host, dtype=np.int32), num_pages)
    with pytest.raises(DtypeError, match="float64"):
        plan_staging(np.zeros(resident), np.zeros(host), num_pages)


def test_rows_of_a_selection_that_does_not_fit_are_refused_and_no_pages_give_no_rows() -> None:
    none = torch.zeros(3, 0, dtype=torch.int32)
    assert staged_rows(torch.zeros(3, 4, dtype=torch.int32), none).eq(-1).all()
    with pytest.raises(ShapeError, match=r"staged_pages has shape \(3, 0\)"):
        staged_rows(torch.zeros(2, 4, dtype=torch.int32), none)
    with pytest.raises(DtypeError, match="int64"):
        staged_rows(torch.zeros(3, 4, dtype=torch.int64), none)


def test_a_staged_page_that_is_nowhere_becomes_zeros() -> None:
    memory, pool = noise(4, LAYOUT.host_block_bytes), noise(2, LAYOUT.block_bytes, seed=2)
    staged = torch.full((8, 656), 0x5A, dtype=torch.uint8)
    stage_pages(memory[2:], pool, i32(-1, 1), i32(-1, -1), staged, LAYOUT, group=0, layer_in_group=0)
    assert staged[:4].eq(0).all() and torch.equal(
        staged[4:], LAYOUT.layer_rows(pool, 0)[LAYOUT.rows_per_block :][:4]
    )


@pytest.mark.parametrize("config", [None, SMALL_STAGE], ids=["shipped", "page-of-two-tiles-and-a-half"])
@pytest.mark.parametrize(("group", "layer"), [(0, 1), (1, 3), (2, 0)])
def test_staged_rows_hold_the_rows_of_the_layer_wherever_their_page_was(
    group: int, layer: int, config: LaunchConfig | None
) -> None:
    host, pool = noise(9, LAYOUT.host_block_bytes), noise(9, LAYOUT.block_bytes, seed=2)
    resident = np.array([[-1, 5, -1], [-1, -1, 7]], dtype=np.int32)
    hosts = np.array([[2, 3, 4], [2, 3, -1]], dtype=np.int32)
    plan = plan_staging(resident, hosts, [3, 3]).to("cpu")
    staged = torch.full((plan.num_pages * 4 + 3, 656), 0x5A, dtype=torch.uint8)
    stage_pages(
        host,
        pool,
        plan.blocks,
        plan.host_blocks,
        staged,
        LAYOUT,
        group=group,
        layer_in_group=layer,
        num_programs=2,
        config=config,
    )
    assert staged[plan.num_pages * 4 :].eq(0x5A).all()
    selection = i32(0, 3, 6, 11, -1, 12).repeat(2, 1)
    rows = staged_rows(selection, plan.staged_pages, page_rows=4)
    assert rows[:, 4:].eq(-1).all()
    for request in range(2):
        for position, row in zip(selection[request, :4].tolist(), rows[request, :4].tolist(), strict=True):
            page, at = divmod(position, 4)
            shared = (
                5 if page == 1 else int(resident[request, page])
            )  # the other request's resident copy serves both
            if shared >= 0:
                want = pool_row(pool, LAYOUT, shared * LAYOUT.rows_per_block + at, layer)
            else:
                want = host_row(
                    host, LAYOUT, int(hosts[request, page]) * 4 + at, LAYOUT.first_layers[group] + layer
                )
            assert torch.equal(staged[row], want)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"blocks": torch.zeros(2, dtype=torch.int64)}, DtypeError, "int64"),
        ({"groups": i32(0)}, ShapeError, "groups"),
        ({"num_pages": i32(1, 1)}, ShapeError, "num_pages"),
        ({"tables": GroupTables(i32(0), i32(2))}, ShapeError, "first_layers"),
        ({"num_pages": i32(1).to("meta")}, DeviceError, "meta"),
        ({"num_programs": 0}, RangeError, "num_programs is 0"),
        ({"host": noise(7)}, StrideError, "7 bytes"),
    ],
)
def test_a_wrong_copy_is_refused_with_its_value(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {
        "host": noise(2, LAYOUT.host_block_bytes), "pool": noise(2, LAYOUT.block_bytes), "blocks": i32(0, 1),
        "host_blocks": i32(0, 1), "groups": i32(0, 1), "num_pages": i32(2), "layout": LAYOUT,
        "tables": TABLES,
        "direction": Direction.TO_HOST,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        copy_pages(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layer_in_group": 4}, RangeError, "layer_in_group is 4"),
        ({"group": 3}, RangeError, "group is 3"),
        ({"staged": noise(7, 656)}, RangeError, "rows of staged is 7"),
        ({"staged": noise(8, 640)}, ShapeError, r"\(8, 640\)"),
        ({"staged": torch.zeros(8, 656)}, DtypeError, "float32"),
        ({"staged": noise(8, 1312)[:, ::2]}, StrideError, "staged"),
        ({"host_blocks": i32(1)}, ShapeError, "host_blocks"),
    ],
)
def test_a_wrong_staging_is_refused_with_its_value(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {
        "host": noise(2, LAYOUT.host_block_bytes), "pool": noise(2, LAYOUT.block_bytes), "blocks": i32(0, 1),
        "host_blocks": i32(0, 1), "staged": noise(8, 656), "layout": LAYOUT, "group": 1, "layer_in_group": 0,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        stage_pages(**(arguments | change))
