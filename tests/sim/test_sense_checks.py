"""What anyone would expect of the simulator before believing it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hisparsim.des.simulate
from hisparsim import simulate
from hisparsim.cost.load import StepLoad
from hisparsim.cost.sources import cost_model
from hisparsim.locality.caches import Replacement, count_misses
from hisparsim.results.records import RequestStatus, RunResult
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import PrefillChunk
from hisparsim.serving.policies.hybrid import Hybrid
from hisparsim.serving.progress import Wedged
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, poisson
from hisparsim_traces.synth.assemble import synthetic_trace

TIMES = ("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns")
FREE_LINKS = tuple(f"links.{name}_gb_per_s=inf" for name in ("h2d", "d2h", "gather", "host_dram", "socket"))


def scenario(policy: str, *overrides: str) -> Scenario:
    return Scenario.load(overrides=[f"policy.name={policy}", *overrides])


def light() -> Trace:
    """A few short requests at a time: no pool is ever short."""
    return poisson(40, 3.0, (500, 6_000), (20, 200), seed=11)


def same_times(first: RunResult, second: RunResult) -> bool:
    return all(np.array_equal(first.requests[name], second.requests[name]) for name in TIMES)


def test_without_pressure_gpu_only_prefix_offload_and_hybrid_give_the_same_times() -> None:
    """But for what hybrid's resolve costs in each step."""
    free = [*FREE_LINKS, "cost.resolve_us=0"]
    runs = [simulate(scenario(policy, *free), light()) for policy in ("gpu-only", "prefix-offload", "hybrid")]
    assert runs[2].summary["missed_rows"] == 0
    assert runs[2].steps["free_blocks"].min() > 0.1 * runs[2].summary["num_gpu_blocks"]
    assert same_times(runs[0], runs[1]) and same_times(runs[0], runs[2])
    for name in ("start_ns", "duration_ns", "num_decodes", "prefill_tokens", "running"):
        assert np.array_equal(runs[0].steps[name], runs[2].steps[name]), name


def test_the_resolve_is_all_that_hybrid_adds_without_pressure() -> None:
    plain, hybrid = (simulate(scenario(policy), light()) for policy in ("gpu-only", "hybrid"))
    resolve = hybrid.steps["cost_resolve_ns"]
    mirror = hybrid.steps["cost_mirror_ns"]
    assert (resolve[hybrid.steps["num_decodes"] > 0] > 0).all() and not plain.steps["cost_resolve_ns"].any()
    assert not mirror.any() and not hybrid.steps["cost_hot_gather_ns"].any()
    first = hybrid.requests["finish_ns"] >= plain.requests["finish_ns"]
    assert first.mean() > 0.9  # a slower step may let a later arrival in earlier
    slower = hybrid.steps["duration_ns"].sum() / plain.steps["duration_ns"].sum()
    assert 1.0 < slower < 1.2


class GoesHotAtOnce(Hybrid):
    """Every request gets its hot buffer at once, so that its pages may leave the GPU."""

    name = "goes-hot-at-once"

    def __init__(self, limits: ServingLimits, **options: object) -> None:
        super().__init__(limits, **options)
        self._low_water = limits.num_blocks


def test_with_free_transfers_and_no_resolve_a_given_running_set_costs_the_same_under_hybrid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both pools admit all twelve requests; hybrid's then loses pages and reads them through hot buffers."""
    free = (*FREE_LINKS, "cost.resolve_us=0", "kv.gpu_kv_gib=10")
    trace = closed_set(12, 9_000, 1_500)
    plain = simulate(scenario("gpu-only", *free), trace)
    monkeypatch.setattr(hisparsim.des.simulate, "policy_class", lambda _name: GoesHotAtOnce)
    hot = simulate(scenario("hybrid", *free), trace)
    assert plain.steps["running"].max() == hot.steps["running"].max() == 12
    assert hot.steps["num_mixed"].max() > 0 and hot.summary["missed_rows"] > 0
    assert same_times(plain, hot)


def closed_set(num: int, prompt: int, output: int) -> Trace:
    """So many equal requests, all there from the start."""
    return synthetic_trace("set", np.zeros(num), np.full(num, prompt), np.full(num, output))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    steps=st.integers(2, 25),
    context=st.integers(20, 200),
    slots=st.lists(st.integers(16, 200), min_size=2, max_size=4),
)
def test_for_a_fixed_selection_stream_more_hot_rows_never_raise_misses(
    seed: int, steps: int, context: int, slots: Sequence[int]
) -> None:
    rng = np.random.default_rng(seed)
    selections = [rng.permutation(context)[:16] for _ in range(steps)]
    misses = [count_misses(selections, hot_rows, Replacement.LRU) for hot_rows in sorted(slots)]
    for fewer, more in pairwise(misses):
        assert (more <= fewer).all()


@pytest.mark.parametrize("policy", ["gpu-only", "prefix-offload", "hybrid", "host-resident"])
@pytest.mark.parametrize("prompt", [1, 63, 2_048, 70_001])
def test_a_request_alone_has_a_ttft_equal_to_the_sum_of_its_prefill_steps(policy: str, prompt: int) -> None:
    given_scenario = scenario(policy, "scheduler.max_num_batched_tokens=8192")
    result = simulate(given_scenario, closed_set(1, prompt, 4))
    steps, requests = result.steps, result.requests
    prefills = steps["prefill_tokens"] > 0
    ttft_ns = int(requests["first_token_ns"][0] - requests["arrival_ns"][0])
    assert ttft_ns == int(steps["duration_ns"][prefills].sum())
    assert int(steps["prefill_tokens"].sum()) == prompt
    assert np.count_nonzero(prefills) == -(-prompt // 8192)


def test_the_first_prefill_step_costs_what_the_cost_model_says() -> None:
    given_scenario = scenario("gpu-only")
    result = simulate(given_scenario, closed_set(1, 5_000, 2))
    load = StepLoad(
        num_prefills=1,
        prefill_tokens=5_000,
        prefill_past_tokens=5_000 * 4_999 // 2,
        prefill_selected_rows=2_048 * 2_049 // 2 + (5_000 - 2_048) * 2_048,
    )
    assert PrefillChunk(0, 0, 5_000, True, 0).num_tokens == load.prefill_tokens
    assert int(result.steps["duration_ns"][0]) == int(cost_model(given_scenario).price(load).total_ns)


def test_a_policy_that_admits_nobody_is_wedged_and_says_who_waits() -> None:
    with pytest.raises(Wedged, match=r"request 0 .* waits for"):
        simulate(scenario("never-admit"), light())


def test_thrashing_ends_and_loses_no_token() -> None:
    trace = poisson(20, 10.0, (500, 3_000), (20, 150), seed=12)
    result = simulate(scenario("thrash"), trace, check=True)
    assert (result.requests["status"] == RequestStatus.FINISHED).all()
    assert np.array_equal(result.requests["output_tokens"], trace.output_tokens)
    assert result.summary["num_preemptions"] > trace.num_requests


def test_more_load_never_finishes_sooner_than_the_trace_offers() -> None:
    """Twice the rate: the same work, no shorter a wait."""
    slow, fast = (
        simulate(scenario("gpu-only", f"workload.time_scale={scale}"), light()) for scale in (1.0, 0.1)
    )
    waits = [run.requests["first_token_ns"] - run.requests["arrival_ns"] for run in (slow, fast)]
    assert waits[1].mean() > waits[0].mean()
    assert slow.summary["offered_load"] < fast.summary["offered_load"]
