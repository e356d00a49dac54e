"""Streams drawn into a top-k file, and buffers fed with recorded ones, against row-by-row references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparsim.locality.caches import CacheError, Replacement, count_misses
from hisparsim.locality.process import ScoreProcess
from hisparsim.locality.profile import LocalityProfile, load_profile
from hisparsim.locality.recorded import (
    RecordedStream,
    RecordingError,
    draw_recording,
    main,
    profile_text,
    read_streams,
    recorded_miss_shares,
    stream_misses,
)
from hisparsim_traces import TraceError
from hisparsim_traces.topk import TopkReader, TopkWriter
from hisparsim_traces.topk_statistics import topk_summary

TINY = load_profile("glm-5.1", 16)
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def streams(draw: st.DrawFn) -> RecordedStream:
    """Selections of a growing context, of any length, with or without the newest token."""
    first = draw(st.integers(1, 12))
    contexts = np.arange(first, first + draw(st.integers(1, 20)))
    selections = tuple(
        np.asarray(sorted(draw(st.sets(st.integers(0, int(context) - 1), max_size=5))), dtype=np.int64)
        for context in contexts
    )
    return RecordedStream(0, 0, contexts, selections)


def slow_lru(stream: RecordedStream, hot_rows: int) -> list[int]:
    """Row by row: the least recently used leave, lower positions first; the newest token is no miss."""
    used: dict[int, int] = {}
    counts = []
    for step, (context, selection) in enumerate(zip(stream.contexts, stream.selections, strict=True)):
        wanted = selection.tolist()
        fresh = [row for row in wanted if row not in used]
        counts.append(sum(row != context - 1 for row in fresh))
        while len(used) + len(fresh) > hot_rows:
            del used[min((row for row in used if row not in wanted), key=lambda row: (used[row], row))]
        used.update(dict.fromkeys(wanted, step))
    return counts


@PATIENT
@given(streams(), st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_lru_misses_are_those_of_a_buffer_run_row_by_row(stream: RecordedStream, more: list[int]) -> None:
    least = max(len(selection) for selection in stream.selections)
    sizes = [max(least, 1) + extra for extra in more]
    misses = stream_misses(stream, sizes, Replacement.LRU)
    assert misses.T.tolist() == [slow_lru(stream, size) for size in sizes]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 6), st.integers(0, 20), st.integers(0, 6), st.integers(0, 99), st.sampled_from(Replacement)
)
def test_streams_that_select_their_newest_token_miss_as_the_exact_buffers_say(
    top_k: int, more: int, extra: int, seed: int, replacement: Replacement
) -> None:
    context = top_k + more
    drawn = list(ScoreProcess(0.3, 0.9, 0.5).selections(context, top_k, 15, seed))
    stream = RecordedStream(
        0, 0, context + 1 + np.arange(15), tuple(np.sort(selection) for selection in drawn)
    )
    misses = stream_misses(stream, [top_k + extra], replacement, seed=3)[:, 0]
    assert misses.tolist() == count_misses(drawn, top_k + extra, replacement, seed=3).tolist()


@PATIENT
@given(st.lists(streams(), min_size=1, max_size=3), st.integers(0, 10))
def test_a_file_gives_back_its_streams_and_a_step_recorded_again_counts_once(
    tmp_path: Path, recorded: list[RecordedStream], again: int
) -> None:
    path = tmp_path / "a.topk"
    with TopkWriter(path, top_k=5, num_groups=2) as writer:
        for request, stream in enumerate(recorded):
            step = min(again, len(stream.selections) - 1)
            writer.append(step, 1, request, int(stream.contexts[step]), [])  # a draft that was rejected
            for number, (context, selection) in enumerate(
                zip(stream.contexts, stream.selections, strict=True)
            ):
                writer.append(number, 1, request, int(context), selection)
    found = read_streams(path)
    assert [(stream.request, stream.group) for stream in found] == [(k, 1) for k in range(len(recorded))]
    for stream, want in zip(found, recorded, strict=True):
        assert stream.contexts.tolist() == want.contexts.tolist()
        assert [one.tolist() for one in stream.selections] == [one.tolist() for one in want.selections]


def test_a_drawn_recording_is_the_profiles_process_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_recording(tmp_path / name, TINY, context_tokens=[100, 300], num_groups=39, num_steps=20, seed=7)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    reader = TopkReader(tmp_path / "a")
    assert (reader.head.top_k, reader.head.num_groups) == (16, 39)
    assert reader.head.about["profile"] == "glm-5.1"
    assert topk_summary(reader)["num_records"] == 2 * 39 * 20
    drawn = read_streams(tmp_path / "a")
    for stream in drawn:
        assert stream.contexts.tolist() == [(100, 300)[stream.request] + step + 1 for step in range(20)]
        assert all(
            len(one) == 16 and one[-1] == c - 1
            for one, c in zip(stream.selections, stream.contexts, strict=True)
        )

    def kept(stream: RecordedStream) -> float:
        pairs = zip(stream.selections, stream.selections[1:], strict=False)
        return float(np.mean([len(np.intersect1d(a, b)) / 16 for a, b in pairs]))

    # one group of 39 draws anew at every step, as 2 of 78 layers do
    assert kept(drawn[39]) < 0.2 < 0.5 < np.mean([kept(stream) for stream in drawn[40:]])
    assert len({tuple(stream.selections[0]) for stream in drawn}) == len(drawn)


def test_the_miss_curve_of_a_recording_is_the_profiles_own(tmp_path: Path) -> None:
    draw_recording(
        tmp_path / "a", load_profile("glm-5.1", 64), context_tokens=[1024, 4096], num_groups=4, num_steps=1400
    )
    recorded = read_streams(tmp_path / "a")
    text = profile_text(recorded, top_k=64, hot_rows=[64, 128, 256], skip_steps=1000, source='of "a"')
    path = tmp_path / "mine.toml"
    path.write_text(text)
    mine = load_profile(str(path), 64)
    assert mine.source == 'of "a"'
    coherent = LocalityProfile("coherent", "", 64, load_profile("glm-5.1", 64).curve, incoherent_share=0.0)
    for context in (2225, 5297):
        shares = recorded_miss_shares(
            [one for one in recorded if one.request == int(context > 4000)],
            [64, 128, 256],
            Replacement.LRU,
            skip_steps=1000,
        )
        assert [mine.miss_share(context, rows) for rows in (64, 128, 256)] == pytest.approx(shares, abs=0.002)
        expected = [coherent.miss_share(context, rows) for rows in (64, 128, 256)]
        assert shares == pytest.approx(expected, rel=0.15, abs=0.01)


def test_better_replacement_misses_less_and_the_command_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_recording(tmp_path / "a", TINY, context_tokens=[300], num_groups=2, num_steps=300, seed=1)
    recorded = read_streams(tmp_path / "a")
    share = {one: recorded_miss_shares(recorded, [32], one, skip_steps=150)[0] for one in Replacement}
    assert share[Replacement.BELADY] < share[Replacement.LRU] < share[Replacement.FIFO]
    main([str(tmp_path / "a"), "16", "32"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["replacement", "16", "32"]
    assert printed[1].split()[2] == f"{100 * share[Replacement.LRU]:.2f}%"
    assert len(printed) == 1 + len(Replacement)


def test_what_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    known = TINY.fitted_to_counters(hits=8, misses=2, context_tokens=1000, hot_rows=32)
    with pytest.raises(RecordingError, match="by its misses only"):
        draw_recording(tmp_path / "a", known, context_tokens=[100], num_groups=1, num_steps=1)
    draw_recording(tmp_path / "a", TINY, context_tokens=[100], num_groups=1, num_steps=4)
    recorded = read_streams(tmp_path / "a")
    with pytest.raises(CacheError, match="15 rows cannot hold a selection of 16"):
        stream_misses(recorded[0], [32, 15], Replacement.LRU)
    with pytest.raises(RecordingError, match="no selected row is left after 4 steps"):
        recorded_miss_shares(recorded, [16], Replacement.LRU, skip_steps=4)
    with pytest.raises(RecordingError, match="at least 2 contexts"):
        profile_text(recorded, top_k=16, hot_rows=[16, 32], skip_steps=0, source="")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-9])
    with pytest.raises(TraceError, match="cut short"):
        read_streams(tmp_path / "b")
