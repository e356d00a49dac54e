import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.sweep.columns import METRICS
from hisparsim.sweep.errors import SweepError
from hisparsim.sweep.ranking import Constraint, Objective, dominates, fronts, order, parse_slo, violated

costs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=9)


@given(costs)
def test_a_front_is_what_none_of_the_rows_behind_it_beats(rows: list[tuple[int, int]]) -> None:
    level = fronts(rows)
    for i, front in enumerate(level):
        beaten_by = {level[j] for j in range(len(rows)) if dominates(rows[j], rows[i])}
        assert front == (max(beaten_by) + 1 if beaten_by else 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=8))
def test_the_best_row_ran_and_breaks_no_constraint_that_another_keeps(
    rows: list[tuple[int, int, bool]],
) -> None:
    records = [
        {**dict.fromkeys(METRICS), "ttft_s.p99": t, "output_tokens_per_s": o, "error": "no" if bad else None}
        for t, o, bad in rows
    ]
    constraints = [Constraint("ttft_s.p99", max=5)]
    ranked = order(records, [Objective("output_tokens_per_s", True)], constraints)
    assert sorted(ranked) == list(range(len(rows)))
    good = [i for i, r in enumerate(records) if r["error"] is None and not violated(r, constraints)]
    if good:
        assert ranked[0] in good
        assert records[ranked[0]]["output_tokens_per_s"] == max(rows[i][1] for i in good)


@pytest.mark.parametrize(
    ("text", "limit", "value", "holds"),
    [
        ("ttft_s.p99=10", "ttft_s.p99 <= 10", 10.0, True),
        ("ttft_s.p99=10", "ttft_s.p99 <= 10", 10.1, False),
        ("output_tokens_per_s=100", "output_tokens_per_s >= 100", 99.0, False),
        ("tokens_per_s_per_user=20", "tokens_per_s_per_user >= 20", 21.0, True),
        ("num_preemptions=0", "num_preemptions <= 0", 1, False),
        ("ttft_s.p99=10", "ttft_s.p99 <= 10", None, False),
    ],
)
def test_an_objective_is_the_most_of_a_latency_and_the_least_of_a_throughput(
    text: str, limit: str, value: float | None, holds: bool
) -> None:
    constraint = parse_slo(text)
    assert str(constraint) == limit
    assert (not violated({constraint.metric: value}, [constraint])) is holds


def test_the_excess_is_relative_to_the_limit() -> None:
    assert Constraint("ttft_s.p99", max=10).excess({"ttft_s.p99": 12.5}) == pytest.approx(0.25)
    assert Constraint("output_tokens_per_s", min=100).excess({"output_tokens_per_s": 125}) == -0.25
    assert math.isinf(Constraint("ttft_s.p99", max=10).excess({}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_s.p98=1", "did you mean 'ttft_s.p9"),
        ("bound_by=pcie", "is text"),
        ("ttft_s.p99", "expected metric=number"),
        ("ttft_s.p99=soon", "expected metric=number"),
        ("ttft_s.p99=inf", "expected metric=number"),
    ],
)
def test_a_wrong_objective_is_one_line(text: str, message: str) -> None:
    with pytest.raises(SweepError, match=message.replace("(", r"\(")):
        parse_slo(text)
