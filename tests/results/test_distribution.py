import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.results.distribution import PERCENTILES, Distribution

pairs = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 6)), max_size=60)


@given(pairs)
def test_weighted_statistics_equal_those_of_the_expanded_sample(sample: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in sample], np.int64)
    weights = np.array([weight for _, weight in sample], np.int64)
    expanded = np.repeat(values, weights)
    weighted = Distribution.of_weighted(values, weights)
    assert weighted.count == len(expanded)
    if not len(expanded):
        assert weighted.p50 is None
        return
    assert weighted.mean == pytest.approx(expanded.mean())
    for percentile in PERCENTILES:
        assert getattr(weighted, f"p{percentile}") == pytest.approx(np.percentile(expanded, percentile))


def test_percentiles_interpolate_linearly_between_order_statistics() -> None:
    distribution = Distribution.of(np.array([1.0, 2.0]))
    assert distribution.p50 == 1.5
    assert distribution.p90 == pytest.approx(1.9)


def test_an_empty_sample_has_no_statistics() -> None:
    assert Distribution.of(np.zeros(0)).as_dict() == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
