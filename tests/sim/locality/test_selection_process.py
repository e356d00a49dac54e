"""The score process: valid, seeded selections with the overlap that its parameters stand for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.locality.process import ProcessError, ScoreProcess, uniform_selections

GLM = ScoreProcess(fast_share=0.09535, slow_correlation=0.99678, fast_correlation=0.58544)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 64), st.integers(0, 300), st.integers(0, 12), st.integers(0, 2**32), st.booleans())
def test_a_selection_is_top_k_distinct_known_positions_with_the_newest_last(
    top_k, more, steps, seed, growing
):
    context = top_k + more
    chosen = list(GLM.selections(context, top_k, steps, seed, growing=growing))
    again = list(GLM.selections(context, top_k, steps, seed, growing=growing))
    assert len(chosen) == steps
    for step, (selection, same) in enumerate(zip(chosen, again, strict=True)):
        newest = context + (step if growing else 0)
        assert selection[-1] == newest
        assert len(set(selection.tolist())) == top_k
        assert selection.min() >= 0
        assert np.sort(selection[:-1])[-1] < newest
        assert np.array_equal(selection, same)


def test_another_seed_gives_other_selections():
    first, second = (np.stack(list(GLM.selections(500, 32, 5, seed))) for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_the_fitted_process_keeps_the_share_of_rows_it_was_fitted_to():
    # Its own miss curve: 19.8 % of the rows at a context of 8 selections are new at each step.
    chosen = list(GLM.selections(4096, 512, 60, seed=3, growing=False))
    kept = [len(np.intersect1d(before, after)) / 512 for before, after in itertools.pairwise(chosen)]
    assert np.mean(kept) == pytest.approx(1 - 0.198, abs=0.01)


def test_a_faster_process_keeps_less_and_uniform_selections_keep_their_chance():
    def kept(selections) -> float:
        chosen = list(selections)
        pairs = itertools.pairwise(chosen)
        return float(np.mean([len(np.intersect1d(before, after)) for before, after in pairs])) / 128

    slow = kept(GLM.selections(4096, 128, 40, 0))
    fast = kept(ScoreProcess(0.5, 0.99678, 0.58544).selections(4096, 128, 40, 0))
    assert slow > fast > 0.2
    assert kept(uniform_selections(4096, 128, 40, 0)) == pytest.approx(128 / 4096, abs=0.01)


@pytest.mark.parametrize("parameters", [(-0.1, 0.9, 0.5), (1.1, 0.9, 0.5), (0.1, 1.0, 0.5), (0.1, 0.9, -0.2)])
def test_parameters_that_make_no_process_are_refused(parameters):
    with pytest.raises(ProcessError):
        ScoreProcess(*parameters)


def test_a_context_shorter_than_a_selection_is_refused():
    with pytest.raises(ProcessError, match="selections"):
        list(GLM.selections(10, 11, 1, 0))
