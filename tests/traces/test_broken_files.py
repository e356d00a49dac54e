"""Files as people break them: one line and exit code 2, or counts that are right. Nothing hangs."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hisparsim_traces import TraceError, load
from hisparsim_traces.cli import app

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + b"".join(
    b"2023-11-16 18:17:0%d.9799600,48%d,1%d\r\n" % (k, k, k) for k in range(9)
)
MOONCAKE = b"".join(
    json.dumps({"timestamp": k, "input_length": 700, "output_length": 3, "hash_ids": [0, k + 1]}).encode()
    + b"\n"
    for k in range(8)
)
OURS = b"arrival_s,input_tokens,output_tokens\n"
LINES = [json.loads(line) for line in MOONCAKE.splitlines()]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def hung(*_: object) -> None:
        raise TimeoutError("the reader hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def error_of(*arguments: object) -> str:
    """The one line a command says when it refuses its input."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2
    assert result.stdout == ""
    said: str = result.stderr
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


REFUSED: dict[str, tuple[bytes, str]] = {
    "cut gzip": (gzip.compress(AZURE * 20)[:40], "damaged or cut-short"),
    "gzip of nothing": (gzip.compress(b""), "is empty"),
    "gzip and junk": (gzip.compress(MOONCAKE) + b"junk", "damaged or cut-short"),
    "cut zstd": (zstandard.compress(MOONCAKE * 100)[:-9], "in the middle of a zstd frame"),
    "damaged zstd": (zstandard.compress(MOONCAKE)[:9] + b"\xff" * 40, "damaged or cut-short"),
    "UTF-16": (AZURE.decode().encode("utf-16"), "is UTF-16 text: convert it first"),
    "UTF-16 without a mark": (MOONCAKE.decode().encode("utf-16-be"), "UTF-16 text: convert it first"),
    "header alone": (OURS, "holds a header and no row"),
    "header without an end": (OURS.strip(), "holds a header and no row"),
    "other columns": (
        AZURE.replace(b"Context", b"Prompt"),
        "no format known here .found TIMESTAMP, PromptTokens",
    ),
    "other keys": (MOONCAKE.replace(b"input_length", b"isl"), "no format known here .found hash_ids, isl"),
    "ten columns": (b"a,b,c,d,e,f,g,h,i,j\n" + b"1,2,3,4,5,6,7,8,9,10\n" * 3, "no format known here"),
    "semicolons": (AZURE.replace(b",", b";"), "no format known here"),
    "a column twice": (OURS.strip() + b",input_tokens\n1,2,3,4\n", ":1: names a column twice"),
    "a list in one line": (json.dumps(LINES).encode(), "is one JSON value, not one object a line"),
    "a list over lines": (json.dumps(LINES, indent=1).encode(), "is one JSON value, not one object a line"),
    "an object over lines": (
        json.dumps(LINES[0], indent=1).encode(),
        "is one JSON value, not one object a line",
    ),
    "an open quote": (OURS.strip() + b',x\n1,2,3,"a\n2,3,4,c\n3,4,5,c\n', "a quote that is never closed"),
    "a line of 3 MiB": (OURS + b"1,2,3\n" + b"9" * (3 << 20) + b",1,1\n", "has a line above 1 MiB"),
    "failures only": (OURS + b"1,0,0\n2,0,0\n", "no usable request .dropped: 2 zero input and output"),
    "NUL bytes": (AZURE.replace(b"48", b"4\0008"), "is binary"),
    "half a Parquet": (b"PAR1" + b"\0" * 90 + b"PAR1", "damaged or cut-short Parquet"),
    "no stamps to trust": (MOONCAKE.replace(b": 0, ", b": NaN, "), "may be mooncake or timed_trace"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load(path)
    assert str(path) in error_of("info", path, "--json")
    error_of("head", path)
    error_of("convert", path, tmp_path / "out.jsonl")
    error_of("fit", path, tmp_path / "law.json")
    assert [one.name for one in tmp_path.iterdir()] == ["broken"]


COUNTED: dict[str, tuple[bytes, int, dict[str, int]]] = {
    "BOM in CSV": (b"\xef\xbb\xbf" + AZURE, 9, {}),
    "BOM in JSON lines": (b"\xef\xbb\xbf" + MOONCAKE, 8, {}),
    "CRLF in JSON lines": (MOONCAKE.replace(b"\n", b"\r\n"), 8, {}),
    "CR alone": (AZURE.replace(b"\r\n", b"\r"), 9, {}),
    "no final newline": (AZURE.rstrip(), 9, {}),
    "two gzip members": (gzip.compress(MOONCAKE) * 2, 16, {}),
    "two zstd frames": (zstandard.compress(MOONCAKE) * 2, 16, {}),
    "negative": (
        OURS + b"1,-5,3\n2,4,-1\n-7,5,5\n",
        1,
        {"negative input_tokens": 1, "negative output_tokens": 1},
    ),
    "no numbers": (
        OURS + b"nan,5,3\n2,nan,1\n1e400,3,3\n4,5,5\n",
        1,
        {"unreadable arrival_s": 2, "unreadable input_tokens": 1},
    ),
    "ids above 64 bits": (
        MOONCAKE * 5 + json.dumps({**LINES[0], "hash_ids": [2**64]}).encode(),
        40,
        {"unreadable hash_ids": 1},
    ),
    "numbers of 5,000 digits": (MOONCAKE + b'{"timestamp": 1' + b"0" * 5000 + b"}", 8, {"not JSON": 1}),
    "1e400 tokens": (
        MOONCAKE * 5 + MOONCAKE.splitlines()[0].replace(b"700", b"1e400"),
        40,
        {"unreadable input_length": 1},
    ),
    "CSV rows among JSON lines": (MOONCAKE + AZURE, 8, {"not JSON": 10}),
    "another trace's rows": (
        AZURE + b"Timestamp,Model,a,b,c,d\n5,x,1,2,3,log\n",
        9,
        {"wrong number of fields": 2},
    ),
    "missing keys at the end": (MOONCAKE * 5 + b'{"timestamp": 1}\n{}\n', 40, {"no input_length": 2}),
    "quoted cells": (
        b'"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2023-11-16 18:17:03.9","5","6"\n',
        1,
        {},
    ),
    "line ends within quotes": (OURS.strip() + b',x\n1,2,3,"a\nb"\n2,3,4,c\n', 2, {}),
    "quotes within cells": (OURS.strip() + b',x\n1,2,3,5" disk\n2,3,4,c\n', 2, {}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_can_be_read_is_counted_right(name: str, tmp_path: Path) -> None:
    content, kept, dropped = COUNTED[name]
    path = tmp_path / "odd"
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["info", str(path), "--json"])
    assert result.exit_code == 0, result.stderr
    info: dict[str, Any] = json.loads(result.stdout)
    assert (info["rows_kept"], info["rows_dropped"]) == (kept, dropped)
    assert info["rows_read"] == kept + sum(dropped.values())


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in (
        ["info", pipe],
        ["info", pipe, "--format", "mooncake"],
        ["info", pipe, "--format", "parquet"],
        ["info", pipe, "--map", "input_tokens=a", "--map", "output_tokens=b"],
        ["head", pipe],
        ["convert", pipe, tmp_path / "o.jsonl"],
        ["slice", pipe, tmp_path / "o.jsonl"],
        ["fit", pipe, tmp_path / "law.json"],
        ["synth", pipe, tmp_path / "o.jsonl"],
        ["topk", pipe],
        ["info", "/dev/zero"],
    ):
        assert "is a pipe or a device" in error_of(*arguments), arguments
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.json").write_text("")
    (folder / "scan.json").write_bytes(b"\x00\x01\x02" * 9)
    assert "folder without files of a format" in error_of("info", folder)
    assert "is a folder; mooncake is read one file at a time" in error_of(
        "info", folder, "--format", "mooncake"
    )
    assert "is a folder: name the file" in error_of("convert", "openhands", folder)
    assert "cannot be read" in error_of("topk", folder)
    assert "no such file" in error_of("info", "a\0b")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.csv"
    path.write_bytes(AZURE)

    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("open", "stat"):  # the file, or the folder it lies in
        with monkeypatch.context() as patched:
            patched.setattr(Path, method, denied)
            with pytest.raises(TraceError, match=r"secret\.csv: cannot be read \(Permission denied\)"):
                load(path)
            assert "cannot be read (Permission denied)" in error_of("info", path)
            assert "cannot be read (Permission denied)" in error_of("synth", path, tmp_path / "o.jsonl")
    assert "cannot be read (File name too long)" in error_of("info", "x" * 5000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "conversation", "--reuse-sample", "nan"], "sample nan"),
        (["info", "{file}", "--reuse-sample", "5"], "sample 5.0"),
        (["slice", "conversation", "{out}", "--spread-ties", "inf"], "tick_s inf"),
        (["slice", "conversation", "{out}", "--gap-cap", "nan"], "gap_cap_s nan"),
        (["slice", "conversation", "{out}", "--start", "nan"], "no request arrives from nan"),
        (["slice", "conversation", "{out}", "--start", "9", "--end", "3"], "no request arrives"),
        (
            ["slice", "conversation", "{out}", "--loop", "service", "--service-scale", "-1"],
            "service_scale -1",
        ),
        (["slice", "openhands", "{out}", "--loop", "gaps"], "turns have none"),
        (["synth", "conversation", "{out}", "--rate", "nan"], "rate nan"),
        (["convert", "{file}", "/proc/nowhere.jsonl"], "/proc/nowhere.jsonl: cannot be written"),
    ],
)
def test_figures_that_make_no_sense_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(AZURE)
    filled = [one.format(file=path, out=tmp_path / "out.jsonl") for one in arguments]
    assert message in error_of(*filled)
    assert not (tmp_path / "out.jsonl").exists()


def test_clients_are_named_by_either_file_and_need_both(tmp_path: Path) -> None:
    (tmp_path / "a-trace.csv").write_text("0,0.5,1.5,Gamma,0.4,9\r\n600,0.5,1,,0,0\r\n")
    lengths = {str(w): {"input_tokens": "{5: 1.0}", "output_tokens": "{3: 1.0}"} for w in (0, 600)}
    (tmp_path / "a-dataset.json").write_text(json.dumps(lengths))
    both = [load(tmp_path / name, seed=3) for name in ("a-trace.csv", "a-dataset.json")]
    assert both[0].arrival_s.tolist() == both[1].arrival_s.tolist()
    for duration in (float("nan"), 0.0, float("inf")):
        with pytest.raises(TraceError, match="duration"):
            load(tmp_path / "a-trace.csv", duration_s=duration)
        assert f"duration {duration}" in error_of("info", tmp_path / "a-trace.csv", "--duration", duration)
    (tmp_path / "a-trace.csv").rename(tmp_path / "b-trace.csv")
    for name in ("b-trace.csv", "a-dataset.json"):
        with pytest.raises(TraceError, match="is half a client"):
            load(tmp_path / name, format="servegen")


cells = st.text(st.sampled_from('ab"\n, é'), max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cells, min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_well_formed_quotes_hide_no_row(tmp_path: Path, texts: list[str], end: str) -> None:
    table = io.StringIO(newline="")
    rows = [("arrival_s", "x", "input_tokens", "output_tokens")]
    csv.writer(table, lineterminator=end).writerows(
        [*rows, *((k, text, 5 + k, 1) for k, text in enumerate(texts))]
    )
    path = tmp_path / "a.csv"
    path.write_bytes(table.getvalue().encode())
    trace = load(path, format="csv")
    assert trace.input_tokens.tolist() == [5 + k for k in range(len(texts))]
    assert trace.source_line.tolist() == [2 + k for k in range(len(texts))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 400), st.integers(1, 3))
def test_a_cut_zstd_file_is_never_a_shorter_trace(tmp_path: Path, cut: int, frames: int) -> None:
    packed = zstandard.compress(MOONCAKE) * frames
    whole = len(zstandard.compress(MOONCAKE))
    left = packed[: max(len(packed) - cut, 1)]
    path = tmp_path / "a"
    path.write_bytes(left)
    if len(left) % whole == 0:
        assert load(path).num_requests == 8 * (len(left) // whole)
    else:
        with pytest.raises(TraceError):
            load(path, format="mooncake")
