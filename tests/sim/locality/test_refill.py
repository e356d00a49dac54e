"""Cold rows: what an empty buffer, a warm one and lost pages miss, against exact LRU row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.des.hot_buffers import HotBuffers
from hisparsim.locality.process import ScoreProcess
from hisparsim.locality.profile import LocalityProfile, load_profile, profile_names
from hisparsim.serving.plan import DecodeBatch

TOP_K = 256
CONTEXT = 12_548
NUM_PAGES = 100
GLM = load_profile("glm-5.1", TOP_K)
COHERENT = LocalityProfile("coherent", "", TOP_K, GLM.curve, incoherent_share=0.0)
NEVER = 10**9


@cache
def streams(num_steps: int) -> tuple[tuple[np.ndarray, ...], ...]:
    process = ScoreProcess(0.09535, 0.99678, 0.58544)
    return tuple(
        tuple(process.selections(CONTEXT, TOP_K, num_steps, seed, growing=False)) for seed in range(6)
    )


def exact_misses(
    stream: Sequence[np.ndarray], hot_rows: int, outside_from: np.ndarray, warm_rows: int = 0
) -> list[int]:
    """LRU by its definition: a position is looked up from the step on in which it left the GPU."""
    used = {row: row - NEVER for row in range(warm_rows)}
    misses = []
    for step, selection in enumerate(stream):
        wanted = {int(row) for row in selection[:-1] if outside_from[row] <= step}
        misses.append(sum(row not in used for row in wanted))
        used |= dict.fromkeys(wanted, step)
        idle = sorted((row for row in used if row not in wanted), key=lambda row: used[row])
        for row in idle[: max(len(used) - hot_rows, 0)]:
            del used[row]
    return misses


def batch(context: int, resident: int, hot_rows: int, query_tokens: int = 1) -> DecodeBatch:
    return DecodeBatch(
        (0,), np.array([context]), np.array([NUM_PAGES]), np.array([resident]), query_tokens, hot_rows
    )


def expected_misses(
    hot_rows: int, num_steps: int, resident_at: Callable[[int], int], *, warm: bool = False
) -> list[float]:
    buffers = HotBuffers(COHERENT, 1, starts_warm=warm)
    missed = []
    for step in range(num_steps):
        decodes = batch(CONTEXT + step + 1, resident_at(step), hot_rows)
        rows = buffers.missed_millirows(decodes, decodes.context_tokens[None, :], np.full((1, 1), NEVER))
        missed.append(rows.item() / 1000)
    return missed


def sums(misses: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [float(np.sum(misses[:end])) for end in ends]


@pytest.mark.parametrize("hot_rows", [256, 512, 1024, 2048])
@pytest.mark.parametrize("warm", [False, True])
def test_a_buffer_fills_as_exact_lru_does(hot_rows: int, warm: bool) -> None:
    outside = np.zeros(CONTEXT + 1)
    runs = [exact_misses(stream, hot_rows, outside, hot_rows * warm) for stream in streams(64)]
    exact = np.mean(runs, axis=0)
    found = expected_misses(hot_rows, 64, lambda step: 0, warm=warm)
    ends = (1, 2, 4, 16, 64)
    assert sums(found, ends) == pytest.approx(sums(exact.tolist(), ends), rel=0.09)


@pytest.mark.parametrize("hot_rows", [256, 512, 1024])
def test_half_of_the_pages_lost_at_once_are_read_once_more(hot_rows: int) -> None:
    page = np.arange(CONTEXT + 1) * NUM_PAGES // (CONTEXT + 1)
    outside = np.where(page < NUM_PAGES // 2, 10, NEVER)
    exact = np.mean([exact_misses(stream, hot_rows, outside) for stream in streams(64)], axis=0)
    found = expected_misses(hot_rows, 64, lambda step: NUM_PAGES if step < 10 else NUM_PAGES // 2)
    ends = (11, 14, 32, 64)
    assert sums(found, ends) == pytest.approx(sums(exact.tolist(), ends), rel=0.09)


@pytest.mark.parametrize("hot_rows", [256, 512])
def test_pages_lost_one_by_one_miss_at_first_use(hot_rows: int) -> None:
    page = np.arange(CONTEXT + 1) * NUM_PAGES // (CONTEXT + 1)
    exact = np.mean([exact_misses(stream, hot_rows, page) for stream in streams(64)], axis=0)
    found = expected_misses(hot_rows, 64, lambda step: NUM_PAGES - 1 - step)
    assert sums(found, (16, 32, 64)) == pytest.approx(sums(exact.tolist(), (16, 32, 64)), rel=0.35)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("hot_rows", [2560, 4096, 8192])
def test_whatever_the_profile_all_cold_rows_are_missed_in_the_end(
    name: str, scale: float, hot_rows: int
) -> None:
    profile = replace(load_profile(name, 2048), scale=scale)
    pages, context = np.array([1000]), np.array([64_000])
    decodes = DecodeBatch((0,), context, pages, np.array([0]), 1, hot_rows)
    added = profile.refill(context, np.array([0]), pages, np.array([1000.0]), hot_rows)
    grown = np.repeat(context[None, :], 20_000, axis=0) + np.arange(20_000)[:, None]
    missed = HotBuffers(profile, 1, starts_warm=False).missed_millirows(
        decodes, grown, np.full_like(grown, NEVER)
    )
    steady = profile.missed_millirows(
        grown[:, 0], np.zeros(20_000, np.int64), np.full(20_000, 1000), hot_rows
    )
    extra = (missed[:, 0] - steady).sum() / 1000
    assert added.first_rows.item() > 0
    assert extra == pytest.approx((added.first_rows + added.later_rows).item(), rel=0.1)


# -- laws -------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(
    STEPS,
    st.integers(0, NUM_PAGES),
    st.sampled_from([2048, 4096, 8192]),
    st.booleans(),
    st.sampled_from(profile_names()),
    st.integers(1, 2),
)
def test_no_step_misses_less_than_the_steady_state_or_more_than_it_looks_up(
    steps: list[tuple[int, int]], resident: int, hot_rows: int, warm: bool, name: str, queries: int
) -> None:
    profile = load_profile(name, 2048)
    buffers = HotBuffers(profile, 1, starts_warm=warm)
    context = NUM_PAGES * 64 - 1000
    for advance, lost in steps:
        context += advance
        resident = max(resident - lost, 0)
        decodes = batch(context, resident, max(hot_rows, queries * 2048), queries)
        looked_up = np.array([[2048 * 1000 * queries * (NUM_PAGES - resident) // NUM_PAGES]])
        missed = buffers.missed_millirows(decodes, decodes.context_tokens[None, :], looked_up)
        steady = profile.missed_millirows(
            decodes.context_tokens, decodes.resident_pages, decodes.pages, decodes.hot_rows, queries
        )
        assert steady <= missed <= np.maximum(looked_up, steady)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.sampled_from([2048, 4096]), st.integers(1, 20), st.integers(1, 2))
def test_steps_at_once_miss_what_they_miss_one_by_one(
    steps: list[tuple[int, int]], hot_rows: int, count: int, queries: int
) -> None:
    profile = load_profile("glm-5.1", 2048)
    together, alone = (HotBuffers(profile, 1, starts_warm=False) for _ in range(2))
    resident, context, rows = NUM_PAGES, 5000, max(hot_rows, queries * 2048)
    for advance, lost in steps:
        context += advance
        resident = max(resident - lost, 1)
        decodes = batch(context, resident, rows, queries)
        grown = context + np.arange(count)[:, None]
        looked_up = np.full((count, 1), NEVER)
        found = together.missed_millirows(decodes, grown, looked_up)[:, 0].tolist()
        slow = [
            alone.missed_millirows(
                batch(int(at), resident, rows, queries), np.array([[at]]), looked_up[:1]
            ).item()
            for at in grown[:, 0]
        ]
        assert found == slow
        context += count


def test_a_buffer_that_was_given_back_starts_again() -> None:
    buffers = HotBuffers(COHERENT, 1, starts_warm=False)

    def misses(context: int) -> int:
        decodes = batch(context, 0, 512)
        return int(buffers.missed_millirows(decodes, np.array([[context]]), np.full((1, 1), NEVER)).item())

    first = misses(CONTEXT)
    assert misses(CONTEXT) == first  # the same step priced twice
    assert misses(CONTEXT + 1) < first / 2
    buffers.forget(0)
    assert misses(CONTEXT + 1) == pytest.approx(first, rel=1e-3)


def test_a_page_that_is_written_into_the_buffer_is_not_cold() -> None:
    buffers = HotBuffers(COHERENT, 1, starts_warm=True)
    settled = []
    for pages in (100, 101):
        context = np.array([pages * 64])
        decodes = DecodeBatch((0,), context, np.array([pages]), np.array([0]), 1, 512)
        for step in range(40):
            grown = context[None, :] + step
            settled.append(buffers.missed_millirows(decodes, grown, np.full((1, 1), NEVER)).item())
    assert settled[40] == pytest.approx(settled[39], rel=0.02)
