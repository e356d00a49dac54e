"""Stretches of quiet steps taken at once equal step by step, record for record; laws hold on random runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_runs import POLICIES, difference, scenarios, tiny, traces

from hisparsim import simulate
from hisparsim.results.records import RequestStatus, RunResult
from hisparsim.serving.progress import Wedged
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, conversations, poisson
from hisparsim_traces.synth.assemble import synthetic_trace

QUICK = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def run(scenario: Scenario, trace: Trace, **how: bool) -> RunResult | str:
    """The result, or why the run ended: in a tight pool a request may never get on."""
    try:
        return simulate(scenario, trace, **how)
    except Wedged as error:
        return str(error)


@pytest.mark.parametrize("policy", POLICIES)
@QUICK
@given(data=st.data())
def test_quiet_stretches_equal_step_by_step_and_the_laws_hold(policy: str, data: st.DataObject) -> None:
    scenario, trace = data.draw(scenarios((policy,))), data.draw(traces())
    quick = run(scenario, trace)
    slow = run(scenario, trace, step_by_step=True)
    checked = run(scenario, trace, check=True)
    if isinstance(quick, str):
        assert policy == "hybrid" and "runs alone" in quick, quick
        assert quick == slow == checked
        return
    assert isinstance(slow, RunResult) and isinstance(checked, RunResult)
    assert difference(quick, slow) is None
    assert difference(quick, checked) is None
    account_for_every_token(quick, trace)
    hold_the_order_of_time(quick)


def account_for_every_token(result: RunResult, trace: Trace) -> None:
    """L6: what a finished request got is what the trace declares, less what was cut off and counted."""
    requests, summary = result.requests, result.summary
    finished = result.has_status(RequestStatus.FINISHED)
    assert np.array_equal(requests["output_tokens"][finished], trace.output_tokens[finished])
    assert not requests["output_tokens"][~finished].any()
    cut = trace.input_tokens - requests["prompt_tokens"]
    assert (cut >= 0).all() and int(cut.sum()) == summary["tokens_truncated"]
    refused = result.has_status(RequestStatus.REJECTED, RequestStatus.SKIPPED)
    assert (finished | refused).all()  # nobody is left over once the last event has passed
    computed = int(result.steps["prefill_tokens"].sum())
    asked = int((requests["prompt_tokens"] - requests["hit_tokens"])[finished].sum())
    assert computed >= asked or summary["num_preemptions"]


def hold_the_order_of_time(result: RunResult) -> None:
    """L7: arrival, admission, first token and finish in order; steps one after another."""
    requests, steps = result.requests, result.steps
    done = result.has_status(RequestStatus.FINISHED)
    order = [requests[name][done] for name in ("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns")]
    for earlier, later in pairwise(order):
        assert (earlier <= later).all()
    assert (order[2] > order[0]).all()
    ends = steps["start_ns"] + steps["duration_ns"]
    assert (steps["start_ns"][1:] >= ends[:-1]).all() and (steps["duration_ns"] >= 0).all()
    cost = sum(steps[name] for name in steps if name.startswith("cost_"))
    if result.scenario["parallel"]["dp"] == 1:
        assert np.array_equal(cost, steps["duration_ns"])
    gaps, weights = result.itl
    assert (gaps >= 0).all() and (weights > 0).all()
    if not result.scenario["speculation"]["draft_tokens"]:  # every token but the first ends a gap
        assert int(weights.sum()) == int((requests["output_tokens"][done] - 1).sum())


def test_long_decodes_take_few_events() -> None:
    trace = poisson(30, 2.0, 300, 500, seed=3)
    for policy in ("gpu-only", "hybrid", "host-resident"):
        result = simulate(tiny(f"policy.name={policy}"), trace)
        assert result.num_steps > 5 * result.summary["num_events"], policy


def test_a_head_of_the_queue_gets_in_as_soon_as_a_transfer_has_freed_memory() -> None:
    """A stretch must not start on a plan that was made before the news."""
    scenario = tiny(
        "policy.name=hybrid",
        "policy.wait_for_write_back=false",
        "policy.transition_on_watermark=false",
        "policy.lease_next_step=false",
        "kv.hot_rows=128",
        "kv.num_gpu_blocks=80",
        "kv.prefix_caching=false",
        "scheduler.max_num_seqs=4",
        "scheduler.max_num_batched_tokens=64",
        "links.h2d_gb_per_s=inf",
        "links.d2h_gb_per_s=inf",
    )
    trace = synthetic_trace(
        "tight",
        np.array([0.0, 0.0, 0.001, 0.001, 0.18, 0.88]),
        np.array([34, 36, 53, 67, 3, 11]),
        np.array([330, 380, 100, 125, 348, 170]),
    )
    assert difference(simulate(scenario, trace), simulate(scenario, trace, step_by_step=True)) is None


def test_a_pool_too_small_for_one_request_is_named_instead_of_preempting_it_for_ever() -> None:
    scenario = tiny(
        "policy.name=hybrid",
        "policy.wait_for_write_back=false",
        "kv.hot_rows=448",
        "kv.num_gpu_blocks=80",
        "kv.prefix_caching=false",
        "speculation.draft_tokens=2",
        "scheduler.max_num_seqs=9",
        "scheduler.max_num_batched_tokens=512",
        "scheduler.async_depth=1",
    )
    trace = synthetic_trace("one", np.zeros(1), np.array([760]), np.array([3]))
    with pytest.raises(Wedged, match=r"request 0 .* runs alone and gets no memory .*kv\.gpu_kv_gib"):
        simulate(scenario, trace)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    scenario = tiny(
        f"policy.name={policy}",
        "speculation.draft_tokens=2",
        "workload.rate_per_s=20",
        "seed=7",
        "scheduler.max_num_batched_tokens=768",
    )
    trace = conversations(6, 3, (50, 400), (20, 90), (5, 60), seed=2)
    first = simulate(scenario, trace)
    assert difference(first, simulate(scenario, trace), ()) is None
    other = simulate(scenario.with_overrides(["seed=8"]), trace)
    assert difference(first, other) is not None
