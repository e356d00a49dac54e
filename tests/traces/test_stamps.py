"""The odd stamps that real traces hold: every way of writing one, clocks that jump, ties, none at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from odd_rows import AZURE, BURST, lines, mooncake

from hisparsim_traces import TraceError, detect, load
from hisparsim_traces.statistics import file_info


def test_a_slice_starts_at_zero(tmp_path: Path) -> None:
    trace = load(lines(tmp_path / "a.jsonl", [mooncake(1_178_625, 600), mooncake(1_179_625, 600)]))
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_time_that_goes_backwards_is_sorted_and_counted(tmp_path: Path) -> None:
    row = {"input_length": 5, "output_length": 2, "hash_ids": {"history": [1]}}
    path = lines(
        tmp_path / "rag.jsonl",
        [
            {**row, "timestamp": "604400", "session_id": "a"},
            {**row, "timestamp": "604453", "session_id": "b"},
            {**row, "timestamp": "0", "session_id": "a"},
            {**row, "timestamp": "7", "session_id": "a"},
        ],
    )
    trace = load(path)
    trace.check()
    assert trace.loading.inversions == 1
    assert trace.source_line.tolist() == [3, 4, 1, 2]
    # over the wrap the session goes on, but its first turn there waits for nobody
    assert trace.session.tolist() == [0, 0, 0, 1]
    assert trace.parent.tolist() == [-1, 0, -1, -1]


def test_a_clock_that_starts_again_can_run_on_or_be_refused(tmp_path: Path) -> None:
    stamps = [0, 500_000, 499_000, 1000, 2000]  # ms: one step of jitter, one new recording
    path = lines(tmp_path / "a.jsonl", [mooncake(stamp, 100 + k) for k, stamp in enumerate(stamps)])
    by_stamp = load(path)
    assert by_stamp.input_tokens.tolist() == [100, 103, 104, 102, 101]
    assert by_stamp.loading.inversions == 2
    run_on = load(path, wraps="continue")
    run_on.check()
    # from the jump on, time goes on where the row before it stood
    assert run_on.input_tokens.tolist() == [100, 102, 103, 101, 104]
    assert run_on.arrival_s.tolist() == [0.0, 499.0, 499.0, 500.0, 500.0]
    assert run_on.loading.changed == {"stamps moved behind the clock's jump back": 2}
    with pytest.raises(TraceError, match=r"a\.jsonl:4: the clock jumps back by 498 s"):
        load(path, wraps="error")


def test_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [mooncake(3000 * (k // 20), 100 + k) for k in range(60)]
    trace = load(lines(tmp_path / "a.jsonl", list(rows)))
    assert trace.input_tokens.tolist() == [100 + k for k in range(60)]
    assert trace.loading.ties == 57


@pytest.mark.parametrize(
    ("stamps", "seconds"),
    [
        (["2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319601"], 0.0520001),
        (["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00"], 0.99007),
        (["2024-05-10 00:00:00+00:00", "2024-05-10T00:00:01.5Z"], 1.5),
        (["2024-05-10 00:00:00", "2024-05-10 02:00:01+02:00"], 1.0),
        (["2024-05-10", "2024-05-10 00:00:00.25"], 0.25),
    ],
)
def test_every_way_of_writing_a_stamp_is_read_exactly(
    tmp_path: Path, stamps: list[str], seconds: float
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE + "".join(f"{stamp},10,2\n" for stamp in stamps))
    trace = load(path)
    assert trace.arrival_s.tolist() == [0.0, pytest.approx(seconds, abs=1e-9)]


def test_seconds_and_milliseconds_are_not_guessed(tmp_path: Path) -> None:
    bare = [{"timestamp": k, "input_length": 10, "output_length": 2} for k in range(3)]
    for name, rows in (
        ("bare", bare),
        ("float", [{**mooncake(0, 600), "timestamp": 0.5}]),
        ("blocks", [mooncake(0, 600, 1, list(range(38)))]),
    ):
        with pytest.raises(TraceError, match="may be mooncake or timed_trace: say which with --format"):
            load(lines(tmp_path / f"{name}.jsonl", list(rows)))
    path = tmp_path / "bare.jsonl"
    assert load(path, format="mooncake").span_s == 0.002
    assert load(path, format="timed_trace").span_s == 2.0
    assert load(path, format="timed_trace", time_unit="us").span_s == 2e-6
    assert detect(lines(tmp_path / "m.jsonl", [mooncake(0, 600)])) == "mooncake"


def test_missing_stamps_are_dropped_not_admitted_at_zero(tmp_path: Path) -> None:
    rows = [
        mooncake(10, 600),
        mooncake(None, 600),
        {"input_length": 5, "output_length": 5, "hash_ids": [0]},
        mooncake(20, 600),
    ]
    trace = load(lines(tmp_path / "a.jsonl", list(rows)), format="mooncake")
    assert trace.loading.rows_dropped == {"no timestamp": 2}
    with pytest.raises(TraceError, match=r"a\.jsonl:2: no timestamp"):
        load(tmp_path / "a.jsonl", format="mooncake", strict=True)


@pytest.mark.parametrize("stamp", [float("nan"), float("inf"), -float("inf"), 1e300, "soon", True, [1]])
def test_stamps_that_are_no_times_reject_their_row(tmp_path: Path, stamp: object) -> None:
    path = lines(tmp_path / "a.jsonl", [mooncake(0, 600), mooncake(stamp, 600), mooncake(5, 600)])
    trace = load(path, format="mooncake")
    assert trace.source_line.tolist() == [1, 3]
    assert sum(trace.loading.rows_dropped.values()) == 1


def test_failed_requests_count_as_arrivals_in_the_recorded_rate(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(BURST + "0,x,10,2,12,API log\n6,x,0,0,0,API log\n10,x,4,1,5,API log\n")
    info = file_info(path)
    assert info["rate_per_s"] == pytest.approx(3 / 10)
    assert info["kept"]["rate_per_s"] == pytest.approx(2 / 10)
