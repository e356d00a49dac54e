"""A launch replayed with other values, or with its programs in another order, gives a fresh run's result."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import CALLS, EACH_CALL, Call

from hisparsim_kernels.interpreter import permuted_programs


def poison(call: Call) -> None:
    for output in call.outputs.values():
        output.fill_(float("nan") if output.is_floating_point() else -77)


@EACH_CALL
def test_a_replay_with_changed_values_writes_every_output_anew(name: str) -> None:
    """Same tensors, other values, poisoned outputs: the result is that of a fresh run."""
    call, fresh = CALLS[name](), CALLS[name]()
    call.run()
    for changed in (call, fresh):
        for value in changed.values.values():
            value.copy_(value.flip(0) if value.numel() > 1 else value // 2)
        if name == "grouped_gemm":
            changed.values["offsets"].copy_(torch.tensor([0, 0, 20, 21]))
        poison(changed)
        changed.run()
    for key, output in call.outputs.items():
        assert torch.equal(output, fresh.outputs[key]), key
        assert not (output.isnan().any() if output.is_floating_point() else (output == -77).any()), key


@EACH_CALL
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_programs_does_not_matter(name: str, seed: int) -> None:
    ascending, permuted = CALLS[name](), CALLS[name]()
    ascending.run()
    with permuted_programs(seed):
        permuted.run()
    for key, output in ascending.outputs.items():
        assert torch.equal(output, permuted.outputs[key]), key
