"""Bytes over PCIe: every page and row is counted once, of one GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from random_runs import PAGE, scenarios, tiny, traces

from hisparsim import simulate
from hisparsim.des.links import HostLink
from hisparsim.serving.progress import Wedged
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace
from hisparsim_traces.synth.assemble import synthetic_trace


def lone_requests(prompt_tokens: list[int], output_tokens: int = 2, gap_s: float = 5.0) -> Trace:
    num = len(prompt_tokens)
    return synthetic_trace(
        "lone", np.arange(num) * gap_s, np.array(prompt_tokens), np.full(num, output_tokens)
    )


def test_ordinary_offload_stores_every_full_page_once() -> None:
    scenario = tiny("policy.name=prefix-offload", "kv.prefix_offload_gib=1")
    page_bytes = simulate(scenario, lone_requests([PAGE])).summary["gpu_block_bytes"]
    result = simulate(scenario, lone_requests([5 * PAGE + 3, 2 * PAGE, PAGE - 9]))
    assert result.summary["d2h_bytes"] == 7 * page_bytes
    assert result.summary["h2d_bytes"] == 0


@pytest.mark.parametrize("policy", ["hybrid", "host-resident"])
def test_every_prompt_row_reaches_the_host_once(policy: str) -> None:
    """A row of all layers is as wide as its page's share of a host block."""
    scenario = tiny(f"policy.name={policy}", "scheduler.max_num_batched_tokens=256")
    result = simulate(scenario, lone_requests([8 * PAGE, 3 * PAGE]))
    rows = 11 * PAGE + 2 * (2 - 1)  # each request computes all its tokens but the last
    row_bytes = result.summary["host_block_bytes"] / PAGE
    assert result.summary["d2h_bytes"] == pytest.approx(rows * row_bytes, rel=0.02)


def test_with_several_replicas_the_bytes_are_those_of_one_gpu() -> None:
    both = ("policy.name=prefix-offload", "kv.prefix_offload_gib=1", "parallel.dp=2")
    alone = simulate(tiny(*both), lone_requests([4 * PAGE])).summary["d2h_bytes"]
    beside = simulate(tiny(*both), lone_requests([4 * PAGE, 4 * PAGE], gap_s=0.0)).summary["d2h_bytes"]
    assert alone == beside > 0


@pytest.mark.interpreted
@settings(max_examples=25, deadline=None, derandomize=True)
@given(scenarios(), traces())
def test_totals_are_flows_plus_what_steps_move(scenario: Scenario, trace: Trace) -> None:
    flows: dict[int, list[int]] = {}
    original = HostLink.transfer

    def noting(self: HostLink, num_bytes: int, kind: object) -> object:
        ways = flows.setdefault(id(self), [0, 0])
        ways[kind.direction is not kind.direction.H2D] += num_bytes  # type: ignore[attr-defined]
        return original(self, num_bytes, kind)  # type: ignore[arg-type]

    monkey = pytest.MonkeyPatch()
    monkey.setattr(HostLink, "transfer", noting)
    try:
        result = simulate(scenario, trace)
    except Wedged:
        return  # a pool too small for one request
    finally:
        monkey.undo()
    if scenario.parallel.dp > 1:
        return
    for way, name in enumerate(("h2d_bytes", "d2h_bytes")):
        moved = sum(ways[way] for ways in flows.values())
        in_steps = int(result.steps[name].sum())  # flows as far as they moved while steps ran
        assert in_steps <= result.summary[name] <= in_steps + moved
