"""Selections come back as they were written; damaged files are known; figures equal counting by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparsim_traces import TraceError
from hisparsim_traces.topk import Selections, TopkReader, TopkWriter, write_selections
from hisparsim_traces.topk_statistics import topk_summary

Record = tuple[int, int, int, int, list[int]]


def records(seed: int, n: int, context: int = 3000, top_k: int = 64) -> list[Record]:
    rng = np.random.default_rng(seed)
    out: list[Record] = []
    for k in range(n):
        size = context + k
        count = int(rng.integers(0, min(top_k, size) + 1))
        out.append((k // 4, k % 3, k % 4, size, sorted(rng.choice(size, count, replace=False).tolist())))
    return out


def write(path: Path, rows: list[Record], top_k: int = 64) -> Path:
    with TopkWriter(path, top_k=top_k, num_groups=3, about={"model": "tiny"}) as writer:
        for row in rows:
            writer.append(*row)
    return path


def read(path: Path) -> list[Record]:
    return [
        (
            int(batch.step[k]),
            int(batch.group[k]),
            int(batch.request[k]),
            int(batch.context[k]),
            batch.selected(k).tolist(),
        )
        for batch in TopkReader(path)
        for k in range(len(batch))
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(0, 50))
def test_selections_come_back_as_they_were(tmp_path: Path, seed: int, n: int) -> None:
    rows = records(seed, n)
    assert read(write(tmp_path / "a.topk", rows)) == rows


def test_many_frames_read_as_one_file_and_take_little_space(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: list[Record] = []
    chosen = np.sort(rng.choice(100_000, 2048, replace=False))
    for step in range(600):
        keep = rng.random(len(chosen)) < 0.9
        new = rng.choice(100_000, 2048 - int(keep.sum()))
        chosen = np.unique(np.concatenate([chosen[keep], new]))
        rows.append((step, 0, 0, 100_000 + step, chosen.tolist()))
    path = write(tmp_path / "a.topk", rows, top_k=2048)
    reader = TopkReader(path)
    assert reader.head.about == {"model": "tiny"}
    assert read(path) == rows
    assert sum(1 for _ in reader) > 1
    assert path.stat().st_size < 2.0 * sum(len(row[4]) for row in rows)  # bytes a position


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((-1, 0, 0, 10, [1]), "from 0"),
        ((0, 3, 0, 10, [1]), "group below 3"),
        ((0, 0, 0, 10, [1, 1]), "must ascend"),
        ((0, 0, 0, 10, [3, 2]), "must ascend"),
        ((0, 0, 0, 10, [10]), "below the context"),
        ((0, 0, 0, 1000, list(range(65))), "at most top_k 64"),
    ],
)
def test_impossible_selections_are_refused(tmp_path: Path, record: Record, message: str) -> None:
    with (
        pytest.raises(TraceError, match=message),
        TopkWriter(tmp_path / "a", top_k=64, num_groups=3) as writer,
    ):
        writer.append(*record)
    with pytest.raises(TraceError, match="cut short"):
        read(tmp_path / "a")


def test_every_cut_and_nearly_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.topk", records(1, 20))
    whole = path.read_bytes()
    damaged = tmp_path / "b.topk"
    for end in range(0, len(whole), 7):
        damaged.write_bytes(whole[:end])
        with pytest.raises(TraceError):
            read(damaged)
    rng = np.random.default_rng(2)
    for _ in range(200):
        at = int(rng.integers(0, len(whole)))
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(0, 8))
        damaged.write_bytes(bytes(changed))
        try:
            rows = read(damaged)
        except TraceError:
            continue
        assert rows == records(1, 20)  # only what is said about the file was changed


def test_figures_equal_counting_by_hand(tmp_path: Path) -> None:
    rows = records(5, 60, context=200)
    summary = topk_summary(TopkReader(write(tmp_path / "a.topk", rows)))
    streams: dict[tuple[int, int], list[tuple[int, set[int]]]] = {}
    for _, group, request, context, chosen in rows:
        streams.setdefault((request, group), []).append((context, set(chosen)))
    total = sum(len(row[4]) for row in rows)
    overlaps, within, cold, recent = [], {1: 0, 4: 0}, 0, 0
    for stream in streams.values():
        for k, (context, chosen) in enumerate(stream):
            if k and chosen:
                overlaps.append(len(chosen & stream[k - 1][1]) / len(chosen))
            for position in chosen:
                last = max((j for j in range(k) if position in stream[j][1]), default=None)
                cold += last is None
                for steps in within:
                    within[steps] += last is not None and k - last <= steps
                recent += position >= context - 64
    assert summary["num_selected"] == total
    assert summary["num_streams"] == len(streams)
    assert summary["step_overlap"]["mean"] == pytest.approx(np.mean(overlaps))
    assert summary["cold_share"] == pytest.approx(cold / total)
    assert summary["returned_within"]["1"] == pytest.approx(within[1] / total)
    assert summary["returned_within"]["4"] == pytest.approx(within[4] / total)
    assert summary["recent_share"]["64"] == pytest.approx(recent / total)


def test_whole_batches_can_be_written(tmp_path: Path) -> None:
    rows = records(2, 9)
    first = next(iter(TopkReader(write(tmp_path / "a.topk", rows))))
    assert isinstance(first, Selections)
    write_selections(tmp_path / "b.topk", [first], top_k=64, num_groups=3)
    assert read(tmp_path / "b.topk") == rows
    with pytest.raises(TraceError, match="no selection was recorded"):
        topk_summary([])
