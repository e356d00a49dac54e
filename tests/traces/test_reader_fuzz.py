"""Damaged and random files: a trace whose counts add up, or one named error. Never a traceback, never a
hang.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparsim_traces import Trace, TraceError, load
from hisparsim_traces.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("error")  # an exception swallowed in a callback is a warning

FUZZ = settings(max_examples=60, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mooncake_rows(n: int) -> bytes:
    rows = [
        {"timestamp": 500 * k, "input_length": 700 + k, "output_length": 3 + k, "hash_ids": [0, k + 1]}
        for k in range(n)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def weka_rows(n: int) -> bytes:
    nested = [{"t": 0, "in": 70, "out": 1, "hash_ids": [7], "api_time": 1.5}]
    calls: list[object] = [
        {"t": 9 * k, "in": 64 * (k + 1), "out": 5, "hash_ids": list(range(k + 1))} for k in range(n)
    ]
    calls.insert(1, {"t": 5.0, "type": "subagent", "duration_ms": 900, "requests": nested})
    one = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": calls}
    return "".join(json.dumps(one) + "\n" for _ in range(3)).encode()


def dynamo_rows(n: int) -> bytes:
    out = []
    for k in range(n):
        replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [2**63, k]}
        request = {
            "request_received_ms": 10**12 + 7 * k,
            "output_tokens": 4,
            "total_time_ms": 3,
            "replay": replay,
        }
        out.append(
            {
                "schema": "dynamo.request.trace.v1",
                "event_type": "request_end",
                "agent_context": {"session_id": f"s{k % 2}"},
                "request": request,
            }
        )
    return "".join(json.dumps(row) + "\n" for row in out).encode()


def other_rows(row: dict[str, object], n: int = 6) -> bytes:
    return "".join(json.dumps({**row, "chat_id": k}) + "\n" for k in range(n)).encode()


SMALL: dict[str, bytes] = {
    "mooncake": mooncake_rows(8),
    "timed_trace": mooncake_rows(3).replace(b"[0, ", b"[" + b"3, " * 43),
    "azure2023": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    + b"".join(b"2023-11-16 18:17:0%d.9799600,48%d,1%d\r\n" % (k, k, k) for k in range(9)),
    "azure2024": b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + b"".join(b"2024-05-10 00:00:0%d.009930+00:00,48%d,1%d\n" % (k, k, k) for k in range(9)),
    "azure-multimodal": b"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    + b"".join(b"2025-05-10 00:00:0%d,2,48%d,1%d\n" % (k, k, k) for k in range(9)),
    "burstgpt": b"Timestamp,Session ID,Elapsed time,Model,"
    + b"Request tokens,Response tokens,Total tokens,Log Type\n"
    + b"".join(b"1944011%d.0,s%d,2,GPT-4,9%d,4,13,Conversation log\n" % (k, k % 3, k) for k in range(9)),
    "weka": weka_rows(3),
    "bailian": other_rows(
        {"parent_chat_id": 1, "timestamp": 0.5, "input_length": 20, "output_length": 2, "hash_ids": [1, 2]}
    ),
    "ragpulse": other_rows(
        {
            "timestamp": "9",
            "input_length": 20,
            "output_length": 2,
            "session_id": "x",
            "hash_ids": {"history": [1]},
        }
    ),
    "dynamo": dynamo_rows(5),
    "blis": b"request_id,session_id,round_index,input_tokens,output_tokens,arrival_time_us,status\n"
    + b"".join(b"%d,s%d,0,1%d,5,%d00,ok\n" % (k, k % 3, k, k) for k in range(9)),
    "llmservingsim": other_rows(
        {
            "arrival_time_ns": 5,
            "sub_requests": [{"input_toks": 9, "output_toks": 2, "tool_duration_ns": 3}] * 2,
        }
    ),
    "csv": b"arrival_s,input_tokens,output_tokens\n" + b"".join(b"%d.5,1%d,5\n" % (k, k) for k in range(9)),
    "jsonl": other_rows({"arrival_s": 1.5, "input_tokens": 7, "output_tokens": 2}),
}


def sound(path: Path, name: str | None) -> Trace | None:
    """The trace with its invariants checked, or None where it was refused with one line."""
    try:
        trace = load(path, format=name)
    except TraceError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return None
    trace.check()
    report = trace.loading
    assert report.rows_read == report.rows_kept + sum(report.rows_dropped.values())
    assert report.rows_kept == trace.num_requests > 0
    return trace


def test_every_format_that_reads_lines_is_fuzzed() -> None:
    assert set(FORMATS) - set(SMALL) == {"servegen", "hisparsim", "parquet"}


@pytest.mark.parametrize("name", SMALL)
def test_the_small_files_themselves_load_whole(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(SMALL[name])
    trace = sound(path, name)
    assert trace is not None and not trace.loading.rows_dropped


@pytest.mark.parametrize("name", SMALL)
@FUZZ
@given(data=st.data())
def test_flipped_cut_and_inserted_bytes_never_crash_a_reader(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(SMALL[name])
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "delete", "repeat"]))
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "flip" and content:
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            odd = [
                b"\n",
                b"\r",
                b",",
                b'"',
                b"\x00",
                b"\xff",
                b"-",
                b"9" * 25,
                b"1e999",
                b"NaN",
                b"[" * 5000,
                b"{}",
                b"\\",
            ]
            content[at:at] = data.draw(st.sampled_from(odd))
        elif kind == "delete":
            del content[at : at + data.draw(st.integers(1, 12))]
        else:
            content[at:at] = content[at : at + 40]
    path = tmp_path / "a"
    path.write_bytes(bytes(content))
    sound(path, name)
    sound(path, None)


@FUZZ
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    sound(path, None)
    for name in ("mooncake", "weka", "csv", "hisparsim", "parquet", "servegen", "burstgpt"):
        sound(path, name)


@FUZZ
@given(cut=st.integers(0, 200), flip=st.integers(0, 200), value=st.integers(0, 255))
def test_damaged_compression_is_refused_or_whole(tmp_path: Path, cut: int, flip: int, value: int) -> None:
    packed = bytearray(gzip.compress(SMALL["mooncake"], mtime=0))
    packed[flip % len(packed)] = value
    path = tmp_path / "a.gz"
    path.write_bytes(bytes(packed[: max(len(packed) - cut, 1)]) if cut % 2 else bytes(packed))
    trace = sound(path, "mooncake")
    if trace is not None:  # gzip's own checksum passed: only bytes it does not cover were touched
        assert trace.loading.rows_read == 8


cells = st.one_of(
    st.integers(-5, 2**70).map(str),
    st.floats(allow_nan=True).map(str),
    st.sampled_from(
        ["", " ", "12", " 7 ", "3.0", "3.5", "1_000", "0x1f", "+4", "-0", "1e3", "ⅷ", "nan", "inf"]
    ),
)


@FUZZ
@given(rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=12))
def test_csv_columns_count_as_a_slow_reader_counts(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    path = tmp_path / "a.csv"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("arrival_s", "input_tokens", "output_tokens"), *rows])
    path.write_text(text.getvalue(), "utf-8")

    def whole(cell: str) -> int | None:
        try:
            number = float(cell) if "_" not in cell else float("nan")
            exact = int(cell) if cell.strip().lstrip("+-").isdigit() else int(number)
        except (ValueError, OverflowError):
            return None
        return exact if number == int(number) and 0 <= exact <= 10**9 else None

    def second(cell: str) -> bool:
        try:
            return "_" not in cell and bool(np.isfinite(float(cell))) and abs(float(cell)) < 9e9
        except ValueError:
            return False

    want = [
        (whole(i), whole(o))
        for t, i, o in rows
        if second(t) and whole(i) is not None and whole(o) is not None
    ]
    positive = [(i, o) for i, o in want if i and o]
    trace = sound(path, "csv")
    blank = sum(all(not cell for cell in row) for row in rows)
    if not positive:
        assert trace is None
        return
    assert trace is not None
    assert trace.loading.rows_read == len(rows) - blank
    assert sorted(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == sorted(
        positive
    )


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "name", ["mooncake", "weka", "bailian", "ragpulse", "dynamo", "llmservingsim", "jsonl"]
)
@FUZZ
@given(data=st.data())
def test_any_json_in_any_field_rejects_its_row_at_most(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    rows = [json.loads(line) for line in SMALL[name].splitlines()]

    def spoil(value: object) -> object:
        """Replace one leaf or branch, found by walking down at random."""
        if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
            key = data.draw(st.sampled_from(sorted(value)))
            return {**value, key: spoil(value[key])}
        if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
            at = data.draw(st.integers(0, len(value) - 1))
            return [*value[:at], spoil(value[at]), *value[at + 1 :]]
        return data.draw(json_values)

    at = data.draw(st.integers(0, len(rows) - 1))
    rows[at] = spoil(rows[at])
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    trace = sound(path, name)
    if trace is not None and name in ("mooncake", "jsonl", "ragpulse"):
        assert trace.loading.rows_read == len(rows)


@FUZZ
@given(data=st.data())
def test_damaged_parquet_is_refused_or_sound(tmp_path: Path, data: st.DataObject) -> None:
    from hisparsim_traces.writing import write_parquet

    whole = tmp_path / "whole.parquet"
    if not whole.exists():
        write_parquet(load("tool-agent").head(20), whole)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.parquet"
    path.write_bytes(bytes(content))
    sound(path, "hisparsim")


@FUZZ
@given(data=st.data())
def test_damaged_client_models_are_refused_or_sound(tmp_path: Path, data: st.DataObject) -> None:
    models: dict[str, Callable[[], bytes]] = {
        "a-trace.csv": lambda: b"0,0,0,,0,0\r\n600,0.02,1.5,Gamma,0.4,9\r\n1200,0.01,2,Weibull,1,1\r\n",
        "a-dataset.json": lambda: json.dumps(
            {str(w): {"input_tokens": "{5: 0.5, 9: 0.5}", "output_tokens": "{3: 1.0}"} for w in (600, 1200)}
        ).encode(),
    }
    spoilt = data.draw(st.sampled_from(sorted(models)))
    for name, made in models.items():
        content = bytearray(made())
        if name == spoilt:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        (tmp_path / name).write_bytes(bytes(content))
    try:
        load(tmp_path / "a-trace.csv", format="servegen").check()
    except TraceError as error:
        assert "\n" not in str(error)
