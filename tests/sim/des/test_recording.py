"""Token times against a plain list of every token, and one timeline of replicas that step on their own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import scenarios, tiny, traces

from hisparsim import simulate
from hisparsim.des.draws import tokens_of_verify_step, uniform
from hisparsim.des.gang import STEP_TABLE_COLUMNS, Gang
from hisparsim.des.recorder import StepTable
from hisparsim.des.replica import Replica
from hisparsim.des.summary import merge_steps
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import StepPlan
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, poisson


@pytest.mark.interpreted
@settings(max_examples=25, deadline=None, derandomize=True)
@given(scenarios(), traces(max_requests=10))
def test_token_times_equal_those_of_a_list_of_all_tokens(scenario: Scenario, trace: Trace) -> None:
    """The slow reference notes each request's every token when its step ends."""
    times: dict[int, list[int]] = {}
    monkey = pytest.MonkeyPatch()
    original = Gang._complete

    def noting(self: Gang, replica: Replica, plan: StepPlan, started_ns: int) -> None:
        core: ServingCore = replica.core
        alive = list(core.requests.values())
        core.settle()
        before = {request.request_id: request.output_tokens for request in alive}
        original(self, replica, plan, started_ns)
        core.settle()
        for request in alive:
            if request.output_tokens > before[request.request_id]:
                times.setdefault(request.request_id, []).append(int(self.world.env.now))

    monkey.setattr(Gang, "_complete", noting)
    try:
        slow = simulate(scenario, trace, step_by_step=True)
    except RuntimeError:
        return  # a pool too small for one request
    finally:
        monkey.undo()
    result = simulate(scenario, trace)
    assert {row for row in times} == set(np.flatnonzero(result.requests["first_token_ns"] >= 0).tolist())
    for row, moments in times.items():
        assert result.requests["first_token_ns"][row] == moments[0]
        assert result.requests["finish_ns"][row] == moments[-1]
    gaps = Counter(gap for moments in times.values() for gap in np.diff(moments).tolist())
    for run in (slow, result):
        found = dict(zip(run.itl[0].tolist(), run.itl[1].tolist(), strict=True))
        assert found == dict(gaps)


def merged_slowly(tables: list[dict[str, np.ndarray]]) -> list[dict[str, int]]:
    """Replay the replicas' steps one by one and look at the state of all after each start."""
    starts = sorted(
        (int(start), owner, index)
        for owner, table in enumerate(tables)
        for index, start in enumerate(table["start_ns"])
    )
    latest: dict[int, int] = {}
    rows = []
    for start, owner, index in starts:
        latest[owner] = index
        own = {name: int(tables[owner][name][index]) for name in STEP_TABLE_COLUMNS}
        state = {
            name: sum(int(tables[other][name][at]) for other, at in latest.items())
            for name in ("running", "waiting", "free_blocks", "hot_blocks", "host_blocks_used", "preemptions")
        }
        rows.append({**own, **state, "start_ns": start})
    for row, following in pairwise(rows):
        row["duration_ns"] = following["start_ns"] - row["start_ns"]
    return rows


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(2, 4))
def test_replicas_merge_into_one_timeline_of_sums(seed: int, num_replicas: int) -> None:
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(num_replicas):
        steps = int(rng.integers(0, 12))
        table = {name: rng.integers(0, 50, steps) for name in STEP_TABLE_COLUMNS}
        table["duration_ns"] = rng.integers(1, 20, steps)
        table["start_ns"] = np.cumsum(table["duration_ns"]) + rng.integers(0, 5)
        tables.append(table)
    merged = merge_steps(tables)
    expected = merged_slowly(tables)
    assert len(merged["start_ns"]) == len(expected)
    for index, row in enumerate(expected):
        for name in (
            "start_ns",
            "running",
            "free_blocks",
            "hot_blocks",
            "preemptions",
            "decode_tokens",
            "h2d_bytes",
        ):
            assert merged[name][index] == row[name], (index, name)
    if expected:
        assert merged["duration_ns"].tolist() == [row["duration_ns"] for row in expected]


def test_replicas_share_the_work_and_lose_nothing() -> None:
    trace = poisson(60, 40.0, (200, 900), (20, 120), seed=3)
    one, two, together = (
        simulate(tiny("policy.name=hybrid", *more), trace)
        for more in ((), ("parallel.dp=2",), ("parallel.dp=2", "parallel.ep=true"))
    )
    for run in (one, two, together):
        assert np.array_equal(run.requests["output_tokens"], trace.output_tokens)
    waits = [
        float((run.requests["first_token_ns"] - run.requests["arrival_ns"]).mean()) for run in (one, two)
    ]
    assert waits[1] < waits[0]
    assert int(two.steps["decode_tokens"].sum()) == int(one.steps["decode_tokens"].sum())


def test_a_step_table_grows_by_rows_and_by_blocks_of_rows() -> None:
    table = StepTable(("a", "b"))
    rows = [[index, 2 * index] for index in range(5_000)]
    for row in rows[:1_500]:
        table.append(row)
    first, second = np.array(rows[1_500:4_000]).T
    table.extend(2_500, (first, second))
    ones = table.extend(1_000, (7, np.arange(8_000, 10_100, 2)))
    ones[:, 0] = np.arange(4_000, 5_000)
    columns = table.as_columns()
    assert columns["a"].tolist() == [row[0] for row in rows]
    assert columns["b"].tolist() == [row[1] for row in rows]


def test_draws_are_uniform_and_do_not_depend_on_the_order_of_calls() -> None:
    counters = [(row, index, draw) for row in range(40) for index in range(40) for draw in range(3)]
    forwards = [uniform(5, *counter) for counter in counters]
    backwards = [uniform(5, *counter) for counter in reversed(counters)]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == len(forwards)
    assert all(0.0 <= value < 1.0 for value in forwards)
    assert np.histogram(forwards, 10, (0, 1))[0] == pytest.approx(np.full(10, 480), rel=0.2)
    assert uniform(6, 0, 0, 0) != uniform(5, 0, 0, 0)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_a_verify_step_yields_the_geometric_number_of_tokens(acceptance: float) -> None:
    drafts = 3
    yields = [
        tokens_of_verify_step(1, row, output, drafts, acceptance) for row in range(60) for output in range(60)
    ]
    expected = sum(acceptance**accepted for accepted in range(drafts + 1))
    assert np.mean(yields) == pytest.approx(expected, rel=0.04)
    assert min(yields) >= 1 and max(yields) <= 1 + drafts
