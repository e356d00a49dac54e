"""Curves: exact at their points, linear between, and the same for one integer as for many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.cost.curve import Curve, CurveBank, CurveError, either, largest, least, token_grid, whole_ns

POINTS = st.lists(
    st.tuples(st.integers(0, 10**7), st.floats(0, 1e12)), min_size=2, max_size=12, unique_by=lambda p: p[0]
)


@given(POINTS, st.lists(st.integers(0, 2 * 10**7), min_size=1, max_size=30))
def test_an_array_is_looked_up_bit_for_bit_as_its_entries_one_by_one(points, xs):
    points.sort()
    curve = Curve([x for x, _ in points], [y for _, y in points])
    many = curve(np.asarray(xs, dtype=np.int64))
    assert many.tolist() == [curve(x) for x in xs]


@given(POINTS)
def test_a_curve_passes_through_its_points_and_stays_constant_before_the_first(points):
    points.sort()
    curve = Curve([x for x, _ in points], [y for _, y in points])
    for x, y in points[:-1]:
        assert curve(x) == y
    assert curve(points[-1][0]) == pytest.approx(
        points[-1][1], rel=1e-9, abs=1e-9 * max(y for _, y in points)
    )
    assert curve(points[0][0] - 1) == points[0][1]


@given(POINTS, st.integers(0, 2 * 10**7))
def test_a_bank_gives_exactly_what_its_curves_give(points, x):
    points.sort()
    xs = [p for p, _ in points]
    curves = [Curve(xs, [y for _, y in points]), Curve(xs, [2 * y + 1 for _, y in points])]
    x = max(x, xs[0])
    assert CurveBank(curves).at(x) == [curve(x) for curve in curves]


def test_a_curve_is_linear_between_and_beyond_its_points():
    curve = Curve([0, 10, 20], [0.0, 5.0, 30.0])
    assert (curve(4), curve(15), curve(30)) == (2.0, 17.5, 55.0)


@pytest.mark.parametrize(
    ("xs", "ys"), [([0], [1.0]), ([0, 0], [1.0, 2.0]), ([5, 1], [1.0, 2.0]), ([0, 1], [1.0])]
)
def test_points_that_make_no_curve_are_refused(xs, ys):
    with pytest.raises(CurveError):
        Curve(xs, ys)


def test_a_bank_of_curves_over_different_points_is_refused():
    with pytest.raises(CurveError):
        CurveBank([Curve([0, 1], [0.0, 1.0]), Curve([0, 2], [0.0, 1.0])])


def test_the_token_grid_is_dense_where_decodes_lie_and_reaches_its_end():
    grid = token_grid(100_000)
    assert grid[:1025].tolist() == list(range(1025))
    assert grid[-1] >= 100_000
    assert np.all(np.diff(grid) > 0)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.floats(-1e9, 1e9))
def test_helpers_treat_arrays_as_their_entries(values, other):
    array = np.asarray(values)
    assert largest(array, other).tolist() == [largest(value, other) for value in values]
    assert least(array, other).tolist() == [least(value, other) for value in values]
    assert whole_ns(array).tolist() == [whole_ns(value) for value in values]
    counts = np.asarray([round(value) for value in values])
    assert either(counts, 1.0, 2.0).tolist() == [either(int(count), 1.0, 2.0) for count in counts]
