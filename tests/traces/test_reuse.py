"""Reuse by cache size equals a cache that is really run; the counting behind it equals counting by hand."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_traces import Trace, TraceError, closed_loop, load
from hisparsim_traces.reuse import (
    earlier_greater,
    ideal_reuse,
    leading_hits,
    previous_access,
    stack_distances,
)


def prompts(seed: int, n: int) -> Trace:
    """Prompts of a random prefix tree."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    fresh = 0
    for row in range(n):
        donor = rows[int(rng.integers(0, row))] if row and rng.random() < 0.7 else []
        ids = donor[: int(rng.integers(0, len(donor) + 1))]
        more = int(rng.integers(0, 6))
        rows.append(ids + list(range(fresh, fresh + more)))
        fresh += more
    counts = np.array([len(ids) for ids in rows])
    trace = closed_loop(n, (np.maximum(counts, 1) * 16).tolist(), 5)
    return replace(
        trace,
        block_tokens=16,
        block_offsets=np.concatenate([[0], np.cumsum(counts)]),
        block_ids=np.array([one for ids in rows for one in ids], np.int64),
    )


def run_lru(trace: Trace, capacity: int) -> int:
    """Blocks found by an LRU cache that touches a prompt's blocks from the last to the first."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for row in range(trace.num_requests):
        ids = trace.blocks(row).tolist()
        for one in ids:
            if one not in cache:
                break
            found += 1
        for one in reversed(ids):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_hit_shares_equal_a_cache_that_is_run(seed: int, n: int) -> None:
    trace = prompts(seed, n)
    trace.check()
    stack = stack_distances(trace)
    for capacity in (0, 1, 2, 5, 17, 60, 10_000):
        assert round(stack.hit_share(capacity) * stack.num_accesses) == run_lru(trace, capacity)
    assert stack.num_distinct == len(np.unique(trace.block_ids))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_ideal_reuse_equals_an_unbounded_set(seed: int, n: int) -> None:
    trace = prompts(seed, n)
    seen: set[int] = set()
    hits = []
    for row in range(n):
        ids = trace.blocks(row).tolist()
        hits.append(next((k for k, one in enumerate(ids) if one not in seen), len(ids)))
        seen.update(ids)
    assert leading_hits(trace).tolist() == hits
    total = len(trace.block_ids)
    assert ideal_reuse(trace).blocks == (sum(hits) / total if total else None)


@given(st.permutations(list(range(23))), st.integers(0, 23))
def test_earlier_greater_counts_inversions(values: list[int], n: int) -> None:
    values = values[:n]
    counted = earlier_greater(np.array(values, np.int64))
    assert counted.tolist() == [sum(v > values[k] for v in values[:k]) for k in range(n)]


@given(st.lists(st.integers(0, 6), max_size=40))
def test_previous_access_is_the_last_equal_element(values: list[int]) -> None:
    found = previous_access(np.array(values, np.int64))
    assert found.tolist() == [
        max((j for j in range(k) if values[j] == values[k]), default=-1) for k in range(len(values))
    ]


def test_a_sample_of_the_ids_comes_near_the_whole() -> None:
    trace = load("tool-agent")
    whole, part = stack_distances(trace), stack_distances(trace, sample=0.2)
    assert part.sample == 0.2
    assert part.num_accesses == pytest.approx(0.2 * whole.num_accesses, rel=0.15)
    for blocks in (500, 2000, 8000):
        assert part.hit_share(blocks) == pytest.approx(whole.hit_share(blocks), abs=0.04)


def test_traces_without_ids_have_no_curve_but_declared_reuse() -> None:
    with pytest.raises(TraceError, match="no block ids"):
        stack_distances(load("openhands"))
    trace = load("openhands")
    assert ideal_reuse(trace).blocks is None
    assert ideal_reuse(trace).tokens == pytest.approx(
        trace.shared_prefix_tokens.sum() / trace.sum_input_tokens
    )
