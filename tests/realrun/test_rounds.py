"""Rounds joined end to end: nothing is lost, nothing counted twice, and metrics are those of the parts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.des.simulate import simulate
from hisparsim.results.metrics import compute_metrics
from hisparsim.results.records import RunResult
from hisparsim.specs.scenario import Scenario
from hisparsim_realrun.bootstrap import latencies_of
from hisparsim_realrun.rounds import COUNTERS, joined
from hisparsim_traces import conversations


@cache
def run_of(seed: int) -> RunResult:
    settings = ["policy.name=hybrid", "workload.concurrency=4", "kv.gpu_kv_gib=4"]
    trace = conversations(3 + seed, 2, (2000, 9000), (64, 300), (3, 40), think_s=0.1, seed=seed)
    return simulate(Scenario.load(None, settings), trace)


ROUNDS = st.lists(st.integers(0, 4), min_size=2, max_size=4)


@settings(max_examples=20, deadline=None)
@given(ROUNDS)
def test_latencies_and_counters_of_joined_rounds_are_those_of_the_rounds(seeds: list[int]) -> None:
    rounds = [run_of(seed) for seed in seeds]
    whole = joined(rounds)
    for name, values in latencies_of(whole).items():
        parts = np.concatenate([latencies_of(part)[name] for part in rounds])
        assert np.allclose(values, parts, equal_nan=True, rtol=1e-12, atol=0)
    for name in COUNTERS:
        if name in rounds[0].summary:
            assert whole.summary[name] == sum(part.summary[name] for part in rounds)
    metrics, each = compute_metrics(whole), [compute_metrics(part) for part in rounds]
    assert metrics.num_preemptions == sum(part.num_preemptions for part in each)
    assert metrics.duration_s == pytest.approx(sum(part.duration_s for part in each), rel=1e-9)
    assert metrics.peak_running == max(part.peak_running for part in each)


@settings(max_examples=20, deadline=None)
@given(ROUNDS)
def test_rounds_follow_one_another_and_are_numbered_on(seeds: list[int]) -> None:
    rounds = [run_of(seed) for seed in seeds]
    whole = joined(rounds)
    starts, durations = whole.steps["start_ns"], whole.steps["duration_ns"]
    assert np.all(starts[1:] >= (starts + durations)[:-1])
    assert whole.requests["request_id"].tolist() == list(range(whole.num_requests))
    sessions = sum(len(np.unique(part.requests["session"])) for part in rounds)
    assert len(np.unique(whole.requests["session"])) == sessions
    assert np.all(np.diff(whole.steps["preemptions"]) >= 0)
    first = rounds[0].num_requests
    assert np.array_equal(whole.requests["finish_ns"][:first], rounds[0].requests["finish_ns"])


def test_one_round_is_the_run_itself_and_joining_changes_no_round() -> None:
    run = run_of(1)
    before = run.requests["arrival_ns"].copy()
    assert joined([run]) is run
    joined([run, run])
    assert np.array_equal(run.requests["arrival_ns"], before)
