"""Gather: bytes of every missed row in every layer, nothing else touched, for tensors and addresses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_kernels.configs import LaunchConfig
from hisparsim_kernels.errors import DeviceError, DtypeError, RangeError, ShapeError, StrideError
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.host_pool import host_argument
from hisparsim_kernels.interpreter import permuted_programs
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references.gather import gather_rows_reference

SMALL = LaunchConfig("gather_rows", "test", 4, 1, {"CHUNKS": 64})


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def scattered_misses(
    layout: PageLayout, host_blocks: int, blocks: int, count: int, seed: int
) -> list[tuple[int, int]]:
    """Host rows in any order, repeats allowed; distinct flat rows inside the first page of their blocks."""
    generator = torch.Generator().manual_seed(seed)
    hot = torch.randperm(blocks * layout.page_rows, generator=generator)[:count]
    flat = hot // layout.page_rows * layout.rows_per_block + hot % layout.page_rows
    source = torch.randint(0, host_blocks * layout.page_rows, (count,), generator=generator)
    return list(zip(source.tolist(), flat.tolist(), strict=True))


def lists(misses: list[tuple[int, int]], capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Miss lists of a capacity; unused entries would address memory far away."""
    host_rows, hot_rows = (torch.full((capacity,), 2**30, dtype=torch.int32) for _ in range(2))
    for i, (source, target) in enumerate(misses):
        host_rows[i], hot_rows[i] = source, target
    return host_rows, hot_rows, torch.tensor([len(misses)], dtype=torch.int32)


@pytest.mark.parametrize("as_address", [False, True], ids=["tensor", "address"])
@pytest.mark.parametrize(
    ("row_bytes", "group_layers", "group"),
    [(128, (1,), 0), (656, (2, 4, 1), 1), (1152, (2, 3), 1), (4096, (1, 2), 0), (16, (3, 5), 1)],
)
def test_every_layer_of_every_missed_row_arrives_and_nothing_else_changes(
    row_bytes: int, group_layers: tuple[int, ...], group: int, as_address: bool
) -> None:
    layout = PageLayout.of_groups(row_bytes, group_layers)
    host, pool = noise(5, layout.host_block_bytes), noise(6, layout.block_bytes, seed=2)
    misses = scattered_misses(layout, 5, 6, 37, seed=row_bytes)
    want = pool.clone()
    gather_rows_reference(host, want, misses, layout, group)
    source = host.data_ptr() if as_address else host
    gather_rows(source, pool, *lists(misses, 64), layout, group=group, num_programs=3)
    assert torch.equal(pool, want)


def test_pools_of_any_contiguous_shape_are_taken_as_bytes() -> None:
    layout = PageLayout.of_groups(656, (2,))
    host, pool = noise(4, layout.host_block_bytes), noise(4, layout.block_bytes, seed=2)
    plan = lists(scattered_misses(layout, 4, 4, 9, seed=6), 9)
    want = pool.clone()
    gather_rows(host, want, *plan, layout, group=0, num_programs=1)
    for shape in ((-1, 1), (-1, 64), (4, -1, 2)):
        got = pool.clone()
        gather_rows(host.view(shape), got.view(shape), *plan, layout, group=0, num_programs=1)
        assert torch.equal(got, want), shape


@pytest.mark.parametrize("count", [0, 1, 64])
def test_the_device_count_bounds_the_list(count: int) -> None:
    layout = PageLayout.of_groups(656, (2,))
    host, pool = noise(4, layout.host_block_bytes), noise(4, layout.block_bytes, seed=2)
    misses = scattered_misses(layout, 4, 4, count, seed=5)
    want = pool.clone()
    gather_rows_reference(host, want, misses, layout, 0)
    host_rows, hot_rows, num_misses = lists(misses, 64)
    gather_rows(host, pool, host_rows, hot_rows, num_misses, layout, group=0, num_programs=2, config=SMALL)
    assert torch.equal(pool, want)


def test_a_count_past_the_list_reads_no_entry_that_is_not_there() -> None:
    layout = PageLayout.of_groups(128, (1,))
    host, pool = noise(2, layout.host_block_bytes), noise(2, layout.block_bytes, seed=2)
    misses = [(3, 5), (70, 66)]
    want = pool.clone()
    gather_rows_reference(host, want, misses, layout, 0)
    host_rows, hot_rows, num_misses = lists(misses, 2)
    gather_rows(host, pool, host_rows, hot_rows, num_misses + 1000, layout, group=0, num_programs=1)
    assert torch.equal(pool, want)


def test_an_entry_with_a_negative_row_is_skipped() -> None:
    layout = PageLayout.of_groups(128, (1,))
    host, memory = noise(2, layout.host_block_bytes), noise(4, layout.block_bytes, seed=2)
    misses = [(3, 5), (-1, 6), (4, -1), (70, 66)]
    want = memory.clone()
    gather_rows_reference(host, want[2:], [misses[0], misses[3]], layout, 0)
    gather_rows(host, memory[2:], *lists(misses, 4), layout, group=0, num_programs=1)
    assert torch.equal(memory, want)  # the blocks before the pool, too


def test_a_leader_and_its_followers_fetch_their_own_rows_with_one_plan() -> None:
    """Layers must not overwrite each other: each has its own offset in the host block and in the GPU
    block."""
    layout = PageLayout.of_groups(656, (2, 4))
    host = noise(3, layout.host_block_bytes)
    together, by_layer = noise(4, layout.block_bytes, seed=2), noise(4, layout.block_bytes, seed=2)
    plan = lists(scattered_misses(layout, 3, 4, 20, seed=9), 20)
    gather_rows(host, together, *plan, layout, group=1, num_programs=2)
    for layer in (0, 2, 1, 3):
        gather_rows(host, by_layer, *plan, layout, group=1, first_layer=layer, num_layers=1, num_programs=2)
    assert torch.equal(together, by_layer)
    target = int(plan[1][0])
    rows = [layout.layer_rows(together, layer)[target] for layer in range(4)]
    assert all(not torch.equal(rows[0], rows[layer]) for layer in (1, 2, 3))


@settings(max_examples=10, deadline=None)
@given(
    row_bytes=st.integers(1, 60).map(lambda n: 16 * n),
    page_rows=st.sampled_from([1, 8, 61, 64]),
    layers=st.integers(1, 3),
    programs=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_row_size_and_grid_copies_the_same_bytes(
    row_bytes: int, page_rows: int, layers: int, programs: int, seed: int
) -> None:
    layout = PageLayout.of_groups(row_bytes, (1, layers), page_rows=page_rows)
    host, pool = noise(3, layout.host_block_bytes, seed=seed), noise(9, layout.block_bytes, seed=seed + 1)
    misses = scattered_misses(layout, 3, 9, 7, seed)
    want = pool.clone()
    gather_rows_reference(host, want, misses, layout, 1)
    with permuted_programs(seed):
        gather_rows(host, pool, *lists(misses, 9), layout, group=1, num_programs=programs, config=SMALL)
    assert torch.equal(pool, want)


def test_pools_past_two_gibiwords_are_addressed_in_64_bits() -> None:
    script = """
        import mmap, torch
        from hisparsim_kernels import interpreter
        interpreter.activate()
        from hisparsim_kernels.gather import gather_rows
        from hisparsim_kernels.page_layout import PageLayout
        LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: pages exist once touched
        layout = PageLayout.of_groups(656, (2, 4), indexer_page_bytes=177408)
        def lazy(block_bytes):
            blocks = (9 * 2**30) // block_bytes  # 2.25 G words of 4 bytes, 14 M rows
            memory = mmap.mmap(-1, blocks * block_bytes, flags=LAZY)
            return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, block_bytes)
        host, pool = lazy(layout.host_block_bytes), lazy(layout.block_bytes)
        at = ((2 + 3) * 64 + 63) * 656  # row 63 of the last layer, host layer 5
        host[-1, at : at + 656] = torch.arange(656) % 251
        hot = (pool.shape[0] - 1) * layout.rows_per_block + 63
        i32 = lambda value: torch.tensor([value], dtype=torch.int32)
        last = host.shape[0] * 64 - 1
        gather_rows(host, pool, i32(last), i32(hot), i32(1), layout, group=1, num_programs=1)
        got = pool[-1].view(-1, 656)[3 * 64 + 63]
        assert torch.equal(got.long(), torch.arange(656) % 251), got
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_host_rows_are_read_by_16_byte_loads_whether_by_tensor_or_by_address() -> None:
    """An address has no alignment of its own; without a hint it would compile to 4-byte loads."""
    script = """
        from hisparsim_kernels import aot, gather, pages
        from hisparsim_kernels.configs import find_config
        for module in (gather, pages):
            for case in module.AOT_CASES:
                if "1152B" not in case.label:
                    continue
                config = find_config(module.__name__.split(".")[-1], case.kernel, case.config)
                ptx = aot._compile(case, config, 90).asm["ptx"]
                loads, stores = ptx.count("ld.global.cg.v4.b32"), ptx.count("st.global")
                assert loads >= 4 and stores == loads, (case.label, loads, stores)
                assert ptx.count(".v4.b32") == loads + stores, case.label
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.returncode == 0, run.stderr


LAYOUT = PageLayout.of_groups(128, (1, 2))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"group": 2}, RangeError, "group is 2"),
        ({"first_layer": 2}, RangeError, "first_layer is 2"),
        ({"first_layer": 1, "num_layers": 2}, RangeError, "num_layers is 2"),
        ({"num_programs": 0}, RangeError, "num_programs is 0"),
        ({"miss_host_rows": torch.zeros(4, dtype=torch.int64)}, DtypeError, "int64"),
        ({"miss_hot_rows": torch.zeros(3, dtype=torch.int32)}, ShapeError, r"\(3,\)"),
        ({"miss_hot_rows": torch.zeros(8, dtype=torch.int32)[::2]}, StrideError, "contiguous"),
        ({"num_misses": torch.zeros(2, dtype=torch.int32)}, ShapeError, "num_misses"),
        ({"num_misses": torch.zeros(1, dtype=torch.int32, device="meta")}, DeviceError, "meta"),
        ({"host": 0}, RangeError, "host address is 0"),
        ({"host": 24}, StrideError, "0x18"),
        ({"host": 2**70}, RangeError, "2.63 - 1"),
        ({"host": None}, DtypeError, "host pool is a NoneType; it must be"),
        ({"pool": [1]}, DtypeError, "list"),
        ({"num_programs": 2.5}, RangeError, "num_programs is 2.5; it must be a whole number"),
        ({"host": noise(100)}, StrideError, "100 bytes"),
        ({"pool": noise(100)}, StrideError, "100 bytes"),
        ({"pool": noise(2, 2 * LAYOUT.block_bytes)[:, ::2]}, StrideError, "GPU pool"),
        (
            {"miss_host_rows": torch.empty(2**28, dtype=torch.int32, device="meta"),
             "miss_hot_rows": torch.empty(2**28, dtype=torch.int32, device="meta"),
             "num_misses": torch.empty(1, dtype=torch.int32, device="meta"),
             "pool": torch.empty(1, LAYOUT.block_bytes, dtype=torch.uint8, device="meta")},
            RangeError, "fetch fewer layers",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_with_its_value(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {
        "host": noise(2, LAYOUT.host_block_bytes), "pool": noise(2, LAYOUT.block_bytes),
        "miss_host_rows": torch.zeros(4, dtype=torch.int32), "miss_hot_rows": torch.zeros(4,
        dtype=torch.int32),
        "num_misses": torch.zeros(1, dtype=torch.int32), "layout": LAYOUT, "group": 1,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        gather_rows(**(arguments | change))


def test_pageable_host_memory_beside_a_gpu_pool_is_refused() -> None:
    class CudaPool:
        device = torch.device("cuda", 0)

    with pytest.raises(DeviceError, match="pageable"):
        host_argument(noise(2, LAYOUT.host_block_bytes), CudaPool(), LAYOUT)  # type: ignore[arg-type]
