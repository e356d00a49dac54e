"""Host code around launches: no allocation, no wait, and nothing that follows values or the batch's size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as stock_interpreter
from kernel_calls import EACH_HOST_CALL, HOST_CALLS, LAYOUT
from torch.utils._python_dispatch import TorchDispatchMode

from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.indexer import KeyFormat, write_index_keys
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.pages import stage_pages
from hisparsim_kernels.rows import read_rows, write_rows


class Recorder(TorchDispatchMode):
    """Names every torch operation of the host code around a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Replace kernels by a record of grid, sizes and addresses, so that host code alone runs."""
    seen: list[tuple[Any, ...]] = []

    def describe(value: Any) -> Any:
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = tuple((key, describe(value)) for key, value in sorted(keywords.items()))
        seen.append((self.fn.__name__, grid, tuple(describe(value) for value in arguments), named))

    monkeypatch.setattr(stock_interpreter.InterpretedFunction, "run", record)
    yield seen


@EACH_HOST_CALL
def test_host_code_allocates_nothing_and_never_waits_for_the_device(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    call = HOST_CALLS[name]()
    launches.clear()
    with Recorder() as recorder:
        call.run()
    allowed = {"aten::view.dtype", "aten::view", "aten::detach", "aten::alias"}
    assert launches and set(recorder.names) <= allowed, sorted(set(recorder.names) - allowed)


@EACH_HOST_CALL
def test_grids_sizes_and_addresses_are_the_same_whatever_the_values_are(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    call = HOST_CALLS[name]()
    launches.clear()
    call.run()
    first = list(launches)
    for value in call.values.values():
        value.zero_()
    launches.clear()
    call.run()
    assert launches == first


def test_the_number_of_rows_is_no_compile_time_constant_of_any_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch or chunk of another size must not compile again: constants stay, and an integer that changes is
    not specialised (1 and multiples of 16 would be)."""
    seen: list[tuple[Any, ...]] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        seen.append((self, arguments, constants))

    monkeypatch.setattr(stock_interpreter.InterpretedFunction, "run", record)
    weight = torch.zeros(3, 128, 256).bfloat16()
    pool, scratch = torch.zeros(50, 576).bfloat16(), DecodeScratch.create(64, 8, 4, "cpu")

    def run(rows: int) -> None:
        ints = torch.zeros(rows, dtype=torch.int32)
        x, out = torch.zeros(rows, 256).bfloat16(), torch.empty(rows, 128)
        grouped_gemm(x, weight, torch.zeros(4, dtype=torch.int32), out)
        write_rows(torch.zeros(rows, 512), torch.zeros(rows, 64), ints, pool)
        read_rows(pool, ints, torch.empty(rows, 576).bfloat16())
        pages = torch.zeros(9, 64 * 132, dtype=torch.uint8)
        write_index_keys(torch.zeros(rows, 128), ints, pages, page_size=64, key_format=KeyFormat.E4M3)
        q, slots = torch.zeros(rows, 8, 576).bfloat16(), torch.zeros(rows, 64, dtype=torch.int32)
        out, lse = torch.empty(rows, 8, 512), torch.empty(rows, 8)
        sparse_mla_prefill(q, pool, slots, ints, scale=0.1, out=out, lse=lse)
        sparse_mla_decode(q, pool, slots, ints, scale=0.1, out=out, lse=lse, scratch=scratch, num_splits=4)
        host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
        blocks = torch.zeros(3, LAYOUT.block_bytes, dtype=torch.uint8)
        staged = torch.zeros(rows * LAYOUT.page_rows, 1152, dtype=torch.uint8)
        stage_pages(host, blocks, ints, ints, staged, LAYOUT, group=0, layer_in_group=1)

    for rows in (16, 1, 37):
        run(rows)
    launches = len(seen) // 3
    for first, *others in zip(*(seen[i * launches : (i + 1) * launches] for i in range(3)), strict=True):
        kernel, arguments, constants = first
        unspecialised = kernel.kwargs["do_not_specialize"] or ()
        for other_kernel, other_arguments, other_constants in others:
            assert other_kernel is kernel and other_constants == constants, kernel.fn.__name__
            for name, one, other in zip(kernel.arg_names, arguments, other_arguments, strict=False):
                if isinstance(one, int) and one != other:
                    assert name in unspecialised, f"{name} of {kernel.fn.__name__}"
