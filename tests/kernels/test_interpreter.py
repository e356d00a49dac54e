"""The corrected interpreter: values, order of programs, and a self-test that notices changed internals."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hisparsim_kernels import interpreter, interpreter_check
from hisparsim_kernels.errors import InterpreterMismatchError


@triton.jit
def _last_writer_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0) * 4 + tl.program_id(1))


@triton.jit
def _extrema_kernel(in_ptr, max_ptr, running_ptr, N: tl.constexpr):
    values = tl.load(in_ptr + tl.arange(0, N))
    tl.store(max_ptr, tl.max(values))
    tl.store(running_ptr + tl.arange(0, N), tl.cumsum(values, 0))


def test_self_test_passes_on_this_triton() -> None:
    interpreter_check.self_test()


def test_self_test_names_the_check_when_the_builder_computes_on_raw_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy as np
    import triton.runtime.interpreter as stock

    def raw_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        return stock.TensorHandle(np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(stock.InterpreterBuilder, "create_dot", raw_dot)
    with pytest.raises(InterpreterMismatchError, match=r"dot of torch\.bfloat16"):
        interpreter_check.self_test()


def test_programs_run_in_a_permuted_order_and_each_exactly_once() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    last = []
    for seed in range(6):
        with interpreter.permuted_programs(seed):
            _last_writer_kernel[(3, 4)](out)
        last.append(out.item())
    assert len(set(last)) > 1
    _last_writer_kernel[(3, 4)](out)
    assert out.item() == 11


def test_bf16_extrema_and_running_sums_are_those_of_torch() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    top, running = torch.empty(1), torch.empty(64, dtype=torch.bfloat16)
    _extrema_kernel[(1,)](values, top, running, N=64)
    assert top.item() == values.max().float().item()
    assert torch.allclose(running.float(), values.float().cumsum(0), atol=0.1)
