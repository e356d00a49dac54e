"""Exact buffers against slow ones written from their definitions, and the laws between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.locality.caches import CacheError, Replacement, count_misses, lru_misses_by_size
from hisparsim.locality.process import ScoreProcess


@st.composite
def streams(draw: st.DrawFn) -> list[np.ndarray]:
    top_k = draw(st.integers(1, 5))
    rows = draw(st.integers(top_k, 20))
    selections = st.lists(st.integers(0, rows - 1), min_size=top_k, max_size=top_k, unique=True)
    return [np.asarray(draw(selections), dtype=np.int64) for _ in range(draw(st.integers(1, 25)))]


def slow_misses(stream: list[np.ndarray], hot_rows: int, replacement: Replacement) -> list[int]:
    """Row by row with dictionaries: LRU, FIFO and Belady as their names say."""
    loaded: dict[int, int] = {}
    used: dict[int, int] = {}
    counts = []
    for step, selection in enumerate(stream):
        wanted = [int(row) for row in selection]
        fresh = [row for row in wanted if row not in loaded]
        counts.append(sum(row != wanted[-1] for row in fresh))
        while len(loaded) + len(fresh) > hot_rows:
            candidates = sorted(row for row in loaded if row not in wanted)

            def next_use(row: int, step: int = step) -> int:
                later = [at for at in range(step + 1, len(stream)) if row in stream[at]]
                return later[0] if later else len(stream) + 1

            key = {
                Replacement.LRU: lambda row: used[row],
                Replacement.FIFO: lambda row: loaded[row],
                Replacement.BELADY: lambda row: -next_use(row),
            }[replacement]
            victim = min(candidates, key=key)
            del loaded[victim]
        for row in fresh:
            loaded[row] = step
        for row in wanted:
            used[row] = step
    return counts


@settings(deadline=None)
@given(
    streams(),
    st.integers(0, 12),
    st.sampled_from([Replacement.LRU, Replacement.FIFO, Replacement.BELADY]),
)
def test_a_buffer_misses_what_its_definition_says(stream, more, replacement):
    hot_rows = len(stream[0]) + more
    assert count_misses(stream, hot_rows, replacement).tolist() == slow_misses(stream, hot_rows, replacement)


@settings(deadline=None)
@given(streams(), st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 5))
def test_all_lru_sizes_at_once_equal_one_buffer_each(stream, more, skip):
    sizes = [len(stream[0]) + extra for extra in more]
    together = lru_misses_by_size(stream, sizes, skip_steps=skip)
    for column, size in enumerate(sizes):
        exact = count_misses(stream, size, Replacement.LRU)
        assert together[:, column].tolist() == exact[skip:].tolist()


@settings(deadline=None)
@given(streams(), st.integers(0, 8), st.integers(1, 8))
def test_more_rows_never_miss_more_under_lru(stream, more, further):
    small = len(stream[0]) + more
    few, many = (count_misses(stream, size, Replacement.LRU) for size in (small, small + further))
    assert np.all(many <= few)


@settings(deadline=None)
@given(streams(), st.integers(0, 8), st.integers(0, 3))
def test_belady_never_loads_more_than_any_other_and_a_buffer_for_all_loads_each_row_once(stream, more, seed):
    hot_rows = len(stream[0]) + more
    # The newest token's own loads are not counted as misses, so loads are compared with a repeated sentinel.
    marked = [np.append(selection, 20) for selection in stream]
    best = count_misses(marked, hot_rows + 1, Replacement.BELADY).sum()
    for replacement in (Replacement.LRU, Replacement.FIFO, Replacement.RANDOM):
        assert count_misses(marked, hot_rows + 1, replacement, seed=seed).sum() >= best
    distinct = len(np.unique(np.concatenate(stream)))
    assert count_misses(marked, 100, Replacement.LRU).sum() == distinct


def test_a_buffer_smaller_than_a_selection_is_refused():
    with pytest.raises(CacheError, match="3 rows"):
        count_misses([np.arange(4)], 3, Replacement.LRU)


@pytest.mark.slow
def test_the_process_meets_the_six_published_figures():
    # HiSparse paper, GLM-5.1, 100,384 tokens, % of 2048: B=2048 30; B=4096 LRU 13.4, FIFO 17.2, random 16.1,
    # Belady 8.2; B=8192 LRU 6.7. Here at an eighth of the size, 250 steps from a filled buffer, with 2 of 78
    # layers drawn anew at every step.
    process = ScoreProcess(0.09535, 0.99678, 0.58544)
    stream = list(process.selections(12_548, 256, 500, seed=5, growing=False))

    def layer_mean(coherent: float, hot_rows: int) -> float:
        return (76 * coherent + 2 * (1 - hot_rows / 100_384)) / 78

    lru = lru_misses_by_size(stream, [256, 512, 1024], skip_steps=250).mean(axis=0) / 256
    found = [layer_mean(share, rows) for share, rows in zip(lru, (2048, 4096, 8192), strict=True)]
    found += [
        layer_mean(count_misses(stream, 512, replacement)[250:].mean() / 256, 4096)
        for replacement in (Replacement.FIFO, Replacement.RANDOM, Replacement.BELADY)
    ]
    assert found == pytest.approx([0.30, 0.134, 0.067, 0.172, 0.161, 0.082], rel=0.06)
