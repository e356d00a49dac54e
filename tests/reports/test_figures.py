from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import synthetic_run

from hisparsim.results import RunResult
from hisparsim_reports.figures import FIGURES, draw_all
from hisparsim_reports.figures.style import policy_colour, spread

POLICIES = ("gpu-only", "prefix-offload", "host-resident", "hybrid")


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return [synthetic_run(policy, num_requests=40) for policy in POLICIES]


def test_every_figure_is_drawn_as_a_png_with_title_and_caption(runs: list[RunResult]) -> None:
    figures = draw_all(runs)
    assert [figure.name for figure in figures] == list(FIGURES)
    for figure in figures:
        assert figure.png.startswith(b"\x89PNG")
        assert figure.title and figure.caption


def test_equal_runs_give_equal_bytes(runs: list[RunResult]) -> None:
    assert [f.png for f in draw_all(runs[:1])] == [f.png for f in draw_all(runs[:1])]


def test_figures_without_data_are_left_out_rather_than_drawn_empty(runs: list[RunResult]) -> None:
    bare = replace(runs[0], steps={k: runs[0].steps[k] for k in ("start_ns", "duration_ns", "running")})
    assert [figure.name for figure in draw_all([bare])] == ["ttft_cdf", "running_and_throughput"]
    nothing = {name: column[:0] for name, column in runs[0].requests.items()}
    no_steps = {name: column[:0] for name, column in runs[0].steps.items()}
    assert draw_all([replace(runs[0], requests=nothing, steps=no_steps)]) == []


def test_main_policies_have_colours_of_their_own() -> None:
    assert len({policy_colour(policy) for policy in POLICIES}) == len(POLICIES)
    assert policy_colour("mine.py:Mine") == policy_colour("mine.py:Mine")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7))
def test_labels_keep_their_order_and_distance_and_stay_inside_where_they_fit(wanted: list[float]) -> None:
    placed = spread(sorted(wanted), 10.0, 100.0)
    assert all(b - a >= 10.0 - 1e-9 for a, b in pairwise(placed))
    assert placed[-1] <= 100.0 + 1e-9
    assert min(placed) >= -1e-9
    assert np.isfinite(placed).all()
