"""Arrivals: open and closed loops, turns, the window's rules and the front end, against slow references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import tiny, traces

from hisparsim import simulate
from hisparsim.des.arrivals import NS_PER_S, Arrivals
from hisparsim.results.records import RequestStatus
from hisparsim_traces import Trace, conversations, poisson
from hisparsim_traces.synth.assemble import synthetic_trace

SERVICE_NS = 70_000_000
"""What the toy server below takes for every request."""


def play(arrivals: Arrivals) -> dict[int, int]:
    """Serve every request that arrives in SERVICE_NS, all at once; row -> when it came."""
    came: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    while True:
        times = [time for time, _ in ends] + ([arrivals.next_ns()] if arrivals.next_ns() is not None else [])
        if not times:
            return came
        now = min(times)
        for end in sorted(end for end in ends if end[0] == now):
            ends.remove(end)
            arrivals.finished(end[1], now, RequestStatus.FINISHED)
        for row in arrivals.due(now):
            assert row not in came
            came[row] = now
            ends.append((now + SERVICE_NS, row))


def expected_open(trace: Trace) -> dict[int, int]:
    """When each row comes in an open loop, by recursion over its parents."""
    came: dict[int, int] = {}
    for row in range(trace.num_requests):  # parents stand earlier
        parent = int(trace.parent[row])
        stamp = trace.arrival_s[row]
        if parent < 0:
            came[row] = round(stamp * NS_PER_S)
            continue
        end = came[parent] + SERVICE_NS
        think = trace.think_s[row]
        if not np.isnan(think):
            came[row] = end + round(think * NS_PER_S)
        else:
            came[row] = end if np.isnan(stamp) else max(end, round(stamp * NS_PER_S))
    return came


@settings(max_examples=80, deadline=None)
@given(traces(max_requests=25))
def test_an_open_loop_follows_stamps_parents_and_think_times(trace: Trace) -> None:
    scenario = tiny("scheduler.max_model_len=100000")
    assert play(Arrivals.of(trace, scenario)) == expected_open(trace)


@settings(max_examples=50, deadline=None)
@given(traces(max_requests=25), st.integers(1, 6))
def test_a_closed_loop_never_has_more_conversations_than_users_and_serves_all(
    trace: Trace, users: int
) -> None:
    scenario = tiny("scheduler.max_model_len=100000", f"workload.concurrency={users}")
    came = play(Arrivals.of(trace, scenario))
    assert set(came) == set(range(trace.num_requests))
    roots = trace.parent < 0
    first_of: dict[int, int] = {}
    for row in range(trace.num_requests):
        first_of[row] = row if roots[row] else first_of[int(trace.parent[row])]
    spans = {
        root: (came[root], max(came[row] for row in came if first_of[row] == root) + SERVICE_NS)
        for root in set(first_of.values())
    }
    for start, _ in spans.values():
        assert sum(begun <= start < end for begun, end in spans.values()) <= users
    started = [came[row] for row in range(trace.num_requests) if roots[row]]
    assert started == sorted(started)  # in the trace's order
    assert started[: min(users, len(started))] == [0] * min(users, len(started))


def test_a_redrawn_rate_is_poisson_and_depends_on_the_seed_alone() -> None:
    trace = poisson(4_000, 1.0, 10, 2, seed=0)
    scenario = tiny("workload.rate_per_s=8", "seed=3")
    came = play(Arrivals.of(trace, scenario))
    gaps = np.diff(sorted(came.values())) / NS_PER_S
    assert came[0] == 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08)
    assert play(Arrivals.of(trace, scenario)) == came
    assert play(Arrivals.of(trace, tiny("workload.rate_per_s=8", "seed=4"))) != came


def test_the_front_end_serves_one_request_after_another_in_order_of_arrival() -> None:
    trace = synthetic_trace(
        "burst", np.array([0.0, 0.0, 0.001, 5.0]), np.array([10, 20, 30, 40]), np.full(4, 2)
    )
    arrivals = Arrivals.of(trace, tiny(), lambda prompt: prompt * 1_000_000)
    assert play(arrivals) == {0: 10_000_000, 1: 30_000_000, 2: 60_000_000, 3: 5_040_000_000}
    assert arrivals.arrival_ns == [0, 0, 1_000_000, 5_000_000_000]  # TTFT counts from the user's side


@pytest.mark.parametrize("rule", ["reject", "skip", "truncate"])
@settings(max_examples=25, deadline=None)
@given(trace=traces(max_requests=25), window=st.integers(80, 900))
def test_the_windows_rule_counts_every_request_that_it_touches(rule: str, trace: Trace, window: int) -> None:
    scenario = tiny(
        f"scheduler.max_model_len={window}", f"workload.over_length={rule}",
        "scheduler.max_num_batched_tokens=2048",
    )  # fmt: skip
    arrivals = Arrivals.of(trace, scenario)
    came = play(arrivals)
    total = trace.input_tokens + trace.output_tokens
    over = total > window
    hopeless = trace.output_tokens >= window
    cut = over & ~hopeless if rule == "truncate" else np.zeros_like(over)
    assert set(came) == set(np.flatnonzero(~over | cut).tolist())
    assert arrivals.counts.truncated == int(cut.sum())
    assert arrivals.counts.tokens_truncated == int((total - window)[cut].sum())
    assert arrivals.counts.skipped == (int(over.sum()) if rule == "skip" else 0)
    assert arrivals.counts.rejected == (0 if rule == "skip" else int((over & ~cut).sum()))
    assert (arrivals.counts.first_rejection is not None) == (arrivals.counts.rejected > 0)
    prompts = np.array(arrivals.prompt_tokens)
    assert np.array_equal(prompts[cut] + trace.output_tokens[cut], np.full(int(cut.sum()), window))
    assert np.array_equal(prompts[~cut], trace.input_tokens[~cut])


def test_a_turn_comes_when_its_parent_has_its_last_token_and_the_user_has_thought() -> None:
    trace = conversations(3, 4, 300, 60, 20, think_s=0.25, seed=1)
    for policy in ("gpu-only", "host-resident", "hybrid"):
        requests = simulate(tiny(f"policy.name={policy}"), trace).requests
        later = np.flatnonzero(trace.parent >= 0)
        ended = requests["finish_ns"][trace.parent[later]]
        assert np.array_equal(requests["arrival_ns"][later], ended + 250_000_000)


def test_the_children_of_a_refused_request_still_come() -> None:
    trace = conversations(1, 3, 100, 50, 2_000, seed=1)
    scenario = tiny("policy.name=gpu-only", "scheduler.max_model_len=2200")
    result = simulate(scenario, trace)
    status = [RequestStatus(code) for code in result.requests["status"]]
    assert status == [RequestStatus.FINISHED, RequestStatus.REJECTED, RequestStatus.REJECTED]
    assert (result.requests["arrival_ns"] >= 0).all()
