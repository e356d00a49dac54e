"""Choosing rows, scaling, replaying and writing keep what a trace means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_traces import (
    LoadReport,
    Trace,
    TraceError,
    closed_loop,
    conversations,
    load,
    poisson,
    prepare,
    spread_ties,
)
from hisparsim_traces.reuse import ideal_reuse
from hisparsim_traces.selecting import reordered
from hisparsim_traces.writing import write_mooncake, write_parquet


def forest(seed: int, n: int, blocks: bool) -> Trace:
    """A random trace: trees of turns, some stamps unknown, random shared prefixes."""
    rng = np.random.default_rng(seed)
    parent = np.array([-1 if row == 0 or rng.random() < 0.4 else rng.integers(0, row) for row in range(n)])
    arrival = np.sort(rng.integers(0, 1000, n)).astype(float)
    arrival -= arrival[0]
    arrival[(parent >= 0) & (rng.random(n) < 0.3)] = np.nan
    inputs, outputs = rng.integers(1, 3000, n), rng.integers(1, 50, n)
    session = np.arange(n)
    for row in np.flatnonzero(parent >= 0):
        session[row] = session[parent[row]]
    _, first, inverse = np.unique(session, return_index=True, return_inverse=True)
    context = inputs[np.maximum(parent, 0)] + outputs[np.maximum(parent, 0)]
    shared = np.where(parent >= 0, (rng.random(n) * np.minimum(context, inputs)).astype(np.int64), 0)
    counts = -(-inputs // 512) if blocks else np.zeros(n, np.int64)
    think = np.where((parent >= 0) & (rng.random(n) < 0.7), rng.random(n) * 100, np.nan)
    trace = Trace(
        name="forest",
        format="synthetic",
        sha256="0",
        arrival_s=arrival,
        input_tokens=inputs,
        output_tokens=outputs,
        session=np.argsort(np.argsort(first))[inverse],
        turn=np.zeros(n, np.int64),
        parent=parent,
        think_s=think,
        shared_prefix_tokens=shared,
        block_tokens=512 if blocks else None,
        block_offsets=np.concatenate([[0], np.cumsum(counts)]),
        block_ids=np.arange(counts.sum()),
        source_line=np.arange(1, n + 1),
        loading=LoadReport(n, n),
    )
    # a turn without a stamp stands right behind its parent
    keys = arrival.copy()
    for row in np.flatnonzero(np.isnan(keys)):
        keys[row] = keys[parent[row]]
    return replace(reordered(trace, np.argsort(keys, kind="stable")), source_line=np.arange(1, n + 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans(), st.data())
def test_any_selection_of_a_sound_trace_is_sound(
    seed: int, n: int, blocks: bool, data: st.DataObject
) -> None:
    trace = forest(seed, n, blocks)
    trace.check()
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    part = trace.select(mask)
    if mask.any():
        part.check()
    kept = part.source_line - 1  # rows set free may move forward, so ask the lines
    assert sorted(kept.tolist()) == np.flatnonzero(mask).tolist()
    assert part.input_tokens.tolist() == trace.input_tokens[kept].tolist()
    assert part.loading.rows_read == n
    for new, old in enumerate(kept.tolist()):
        ancestor, shared = int(trace.parent[old]), int(trace.shared_prefix_tokens[old])
        while ancestor >= 0 and not mask[ancestor]:  # the slow way up
            shared = min(shared, int(trace.shared_prefix_tokens[ancestor]))
            ancestor = int(trace.parent[ancestor])
        assert part.parent[new] == (-1 if ancestor < 0 else int(np.flatnonzero(kept == ancestor)[0]))
        assert part.shared_prefix_tokens[new] == (0 if ancestor < 0 else shared)


def test_selecting_twice_is_selecting_once() -> None:
    trace = forest(3, 40, True)
    once = trace.select(np.arange(5, 30))
    twice = trace.select(slice(2, 35)).select(slice(3, 28))
    for name in ("arrival_s", "input_tokens", "parent", "session", "shared_prefix_tokens", "block_ids"):
        assert np.array_equal(getattr(once, name), getattr(twice, name), equal_nan=name == "arrival_s"), name


def test_head_and_scaled_do_what_they_say() -> None:
    trace = poisson(100, 2.0, (10, 500), 20, seed=4)
    assert trace.head(10).num_requests == 10
    assert np.allclose(trace.scaled(0.5).arrival_s, trace.arrival_s / 2)
    with pytest.raises(TraceError, match="time scale 0"):
        trace.scaled(0.0)
    with pytest.raises(TraceError, match="increasing order"):
        trace.select(np.array([3, 1]))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"input_tokens": np.array([1, 0])}, "input_tokens >= 1"),
        ({"parent": np.array([1, -1])}, "stands earlier"),
        ({"arrival_s": np.array([1.0, 2.0])}, "first arrival is 0"),
        ({"arrival_s": np.array([0.0, np.nan])}, "without a parent has an arrival"),
        ({"think_s": np.array([1.0, np.nan])}, "think_s >= 0, only with a parent"),
        ({"session": np.array([3, 1])}, "sessions are dense"),
        ({"shared_prefix_tokens": np.array([0, 5])}, "shares a prefix"),
        ({"block_offsets": np.array([0, 1, 1])}, "number of block ids"),
        ({"turn": np.array([0])}, "turn has 1 rows"),
    ],
)
def test_broken_invariants_are_named(change: dict[str, object], rule: str) -> None:
    trace = closed_loop(2, 10, 5)
    with pytest.raises(TraceError, match=rule):
        replace(trace, **change).check()  # type: ignore[arg-type]


def test_a_report_that_does_not_add_up_cannot_be_made() -> None:
    with pytest.raises(TraceError, match="does not add up"):
        LoadReport(rows_read=3, rows_kept=1, rows_dropped={"x": 1})


# replay


def turns() -> Trace:
    """Three calls of one session at 0, 100 and 1000 s; 30 s of service before the first pause of 70 s."""
    trace = conversations(1, 3, 100, 10, 5)
    return replace(
        trace,
        arrival_s=np.array([0.0, 100.0, 1000.0]),
        think_s=np.array([np.nan, 70.0, 860.0]),
    )


def test_service_time_is_scaled_once_and_think_time_not() -> None:
    slow = prepare(turns(), loop="service", service_scale=2.0)
    assert slow.arrival_s.tolist() == [0.0, 60.0 + 70.0, 130.0 + 80.0 + 860.0]
    assert np.isnan(slow.think_s).all()
    assert prepare(turns(), loop="service").arrival_s.tolist() == [0.0, 100.0, 1000.0]


def test_loops_tell_how_a_turn_starts() -> None:
    assert prepare(turns()).think_s[1:].tolist() == [70.0, 860.0]
    gaps = prepare(turns(), loop="gaps")
    assert np.isnan(gaps.think_s).all()
    assert gaps.parent.tolist() == [-1, 0, 1]
    loose = prepare(turns(), loop="open")
    assert loose.parent.tolist() == [-1, -1, -1]
    loose.check()
    with pytest.raises(TraceError, match="2 turns have none"):
        prepare(conversations(1, 3, 100, 10, 5), loop="gaps")


def test_a_gap_cap_is_in_the_traces_own_seconds_and_the_scale_comes_last() -> None:
    capped = prepare(turns(), gap_cap_s=60.0, time_scale=0.1)
    assert capped.arrival_s.tolist() == pytest.approx([0.0, 6.0, 12.0])
    assert capped.think_s[1:].tolist() == pytest.approx([6.0, 6.0])


def test_window_and_limit_come_first() -> None:
    trace = poisson(200, 1.0, 10, 5, seed=1)
    part = prepare(trace, start_s=50.0, end_s=100.0, limit=7)
    inside = np.flatnonzero((trace.arrival_s >= 50) & (trace.arrival_s < 100))[:7]
    assert part.source_line.tolist() == (inside + 1).tolist()
    assert part.arrival_s[0] == 0.0
    with pytest.raises(TraceError, match="no request arrives from 900"):
        prepare(trace, start_s=900.0)


def test_ties_can_be_spread_within_their_tick() -> None:
    trace = closed_loop(6, 10, 5)
    ticks = replace(trace, arrival_s=np.array([0.0, 0.0, 0.0, 3.0, 3.0, 4.0]))
    assert spread_ties(ticks, 3.0).arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 3.5, 4.0]


# writing


def same_prefixes(a: Trace, b: Trace) -> bool:
    return bool(np.array_equal(a.block_offsets, b.block_offsets) and np.array_equal(a.block_ids, b.block_ids))


@pytest.mark.parametrize("name", ["conversation", "tool-agent"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_mooncake_and_back_keeps_lengths_times_and_prefixes(tmp_path: Path, name: str, suffix: str) -> None:
    trace = load(name)
    path = tmp_path / f"a{suffix}"
    write_mooncake(trace, path)
    back = load(path)
    assert back.format == "mooncake"
    assert np.array_equal(back.input_tokens, trace.input_tokens)
    assert np.array_equal(back.output_tokens, trace.output_tokens)
    assert np.abs(back.arrival_s - trace.arrival_s).max() <= 1e-3
    assert same_prefixes(back, trace)


@pytest.mark.parametrize("name", ["conversation", "openhands", "million-token", "code-completion"])
def test_parquet_and_back_keeps_everything(tmp_path: Path, name: str) -> None:
    trace = load(name)
    write_parquet(trace, tmp_path / "a.parquet")
    back = load(tmp_path / "a.parquet")
    back.check()
    for column in (
        "input_tokens",
        "output_tokens",
        "session",
        "turn",
        "parent",
        "think_s",
        "shared_prefix_tokens",
        "block_offsets",
        "block_ids",
        "block_tokens",
    ):
        a, b = getattr(back, column), getattr(trace, column)
        assert np.array_equal(a, b, equal_nan=True) if column == "think_s" else np.array_equal(a, b), column
    assert np.allclose(back.arrival_s, trace.arrival_s, atol=1e-9, rtol=0, equal_nan=True)


def test_turns_become_session_rows_that_share_their_whole_blocks(tmp_path: Path) -> None:
    trace = conversations(3, 4, 2000, 700, 300, think_s=2.5)
    write_mooncake(trace, tmp_path / "a.jsonl")
    back = load(tmp_path / "a.jsonl")
    back.check()
    assert np.array_equal(back.parent, trace.parent)
    assert np.array_equal(back.think_s, trace.think_s, equal_nan=True)
    for row in np.flatnonzero(back.parent >= 0):
        whole = int(trace.shared_prefix_tokens[row]) // 512
        parents = int(trace.input_tokens[trace.parent[row]]) // 512
        assert back.blocks(row)[:parents].tolist() == back.blocks(back.parent[row])[:parents].tolist()
        assert whole >= parents
    assert ideal_reuse(back).tokens <= ideal_reuse(trace).tokens


def test_smaller_blocks_are_merged_without_inventing_reuse(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = load("conversation").head(40)
    inputs = rng.integers(1, 3000, 40)
    fine: list[list[int]] = []
    fresh = 0
    for row in range(40):
        count = int(inputs[row]) // 64
        donor = fine[int(rng.integers(0, row))] if row else []
        ids = donor[: int(rng.integers(0, count + 1))]
        ids = ids + list(range(fresh, fresh + count - len(ids)))
        fresh += count
        fine.append(ids)
    counts = [len(ids) for ids in fine]
    trace = replace(
        base,
        input_tokens=inputs,
        block_tokens=64,
        block_offsets=np.concatenate([[0], np.cumsum(counts)]),
        block_ids=np.array([one for ids in fine for one in ids]),
    )
    write_mooncake(trace, tmp_path / "a.jsonl")
    back = load(tmp_path / "a.jsonl", format="mooncake")
    for a in range(40):
        for b in range(a):
            equal = 0
            for x, y in zip(fine[a], fine[b], strict=False):
                if x != y:
                    break
                equal += 1
            found = 0
            for x, y in zip(back.blocks(a).tolist(), back.blocks(b).tolist(), strict=False):
                if x != y:
                    break
                found += 1
            whole_prompts = inputs[a] == inputs[b] and equal == counts[a] == counts[b] and inputs[a] % 64 == 0
            assert found == -(-int(inputs[a]) // 512) if whole_prompts else found == equal * 64 // 512


def test_a_tree_of_turns_without_stamps_cannot_be_mooncake(tmp_path: Path) -> None:
    tree = replace(conversations(1, 3, 100, 10, 5), parent=np.array([-1, 0, 0]))
    with pytest.raises(TraceError, match="write Parquet instead"):
        write_mooncake(tree, tmp_path / "a.jsonl")
