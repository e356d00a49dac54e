"""Kinds of requests are kept in the source's words, through every way a trace is cut, stored and counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hisparsim_traces import Trace, TraceError, load, prepare
from hisparsim_traces.cli import app
from hisparsim_traces.kinds import MAX_KINDS, OTHER, KindBook, Kinds, compact, joined
from hisparsim_traces.statistics import file_info
from hisparsim_traces.trace import columns_sha256
from hisparsim_traces.writing import write_mooncake, write_parquet

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def spelled(kinds: Kinds | None) -> list[str | None]:
    return [] if kinds is None else [kinds.of(row) for row in range(len(kinds))]


def lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def burst(tmp_path: Path) -> Trace:
    path = tmp_path / "burst.csv"
    path.write_text(
        BURST
        + "3,x,10,2,12,API log\n1,x,11,2,13,Conversation log\n2,x,12,2,14,\n"
        + "4,x,0,0,0,Failed\n5,x,13,2,15,API log\n"
    )
    return load(path)


def test_kinds_follow_their_rows_through_sorting_dropping_and_choosing(burst: Trace) -> None:
    burst.check()
    assert spelled(burst.kind) == ["Conversation log", None, "API log", "API log"]
    assert burst.kind is not None and burst.kind.codes.dtype == np.int16
    part = burst.select(np.array([False, True, True, False]))
    assert spelled(part.kind) == [None, "API log"]
    assert part.kind is not None and part.kind.names == ("API log",)  # names of nobody are left out
    assert burst.select(slice(1, 2)).kind is None
    assert spelled(burst.scaled(2.0).kind) == spelled(burst.kind)
    assert spelled(prepare(burst, start_s=0.5, limit=2, gap_cap_s=1.0, time_scale=3.0).kind) == [
        None,
        "API log",
    ]


def test_sources_without_kinds_have_none(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}
    assert load(lines(tmp_path / "a.jsonl", [row]), format="mooncake").kind is None
    path = tmp_path / "b.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n")
    assert load(path).kind is None
    assert file_info(path)["kinds"] is None


def test_bailian_types_and_weka_calls_are_kinds(tmp_path: Path) -> None:
    turns = [
        {
            "chat_id": k,
            "parent_chat_id": -1,
            "timestamp": k,
            "input_length": 5,
            "output_length": 2,
            "type": kind,
        }
        for k, kind in enumerate(["text", "image", "text", None])
    ]
    assert spelled(load(lines(tmp_path / "q.jsonl", list(turns))).kind) == ["text", "image", "text", None]
    call = {"in": 64, "out": 1, "hash_ids": [1]}
    calls = [
        {**call, "t": 0, "type": "n", "api_time": 1},
        {"t": 5, "type": "subagent", "duration_ms": 900, "requests": [{**call, "t": 0, "type": "n"}]},
        {**call, "t": 9, "type": "s"},
    ]
    weka = load(lines(tmp_path / "w.jsonl", [{"hash_id_scope": "local", "requests": calls}]))
    assert spelled(weka.kind) == ["n", "subagent", "s"]


def test_plain_files_name_their_column_of_kinds(tmp_path: Path) -> None:
    columns = {"input_tokens": "i", "output_tokens": "o", "kind": "what"}
    table = {"i": [1, 2, 3], "o": [1, 1, 1], "what": ["chat", "", "batch"]}
    csv = tmp_path / "a.csv"
    csv.write_text("i,o,what\n1,1,chat\n2,1,\n3,1,batch\n")
    jsonl = lines(
        tmp_path / "a.jsonl",
        [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)],
    )
    pq.write_table(
        pa.table({**table, "what": pa.array(table["what"]).dictionary_encode()}), tmp_path / "a.parquet"
    )
    for path in (csv, jsonl, tmp_path / "a.parquet"):
        assert spelled(load(path, columns=columns).kind) == ["chat", None, "batch"], path
    with pytest.raises(TraceError, match="has no column 'nowhere'"):
        load(csv, columns={**columns, "kind": "nowhere"})


def test_parquet_keeps_kinds_and_mooncake_says_that_it_does_not(burst: Trace, tmp_path: Path) -> None:
    write_parquet(burst, tmp_path / "a.parquet")
    back = load(tmp_path / "a.parquet")
    assert spelled(back.kind) == spelled(burst.kind)
    write_mooncake(burst, tmp_path / "a.jsonl")
    assert load(tmp_path / "a.jsonl", format="mooncake").kind is None
    for name, said in (("b.jsonl", True), ("b.parquet", False)):
        result = CliRunner().invoke(app, ["convert", str(tmp_path / "burst.csv"), str(tmp_path / name)])
        assert result.exit_code == 0
        assert ("kinds are not written" in result.stderr) == said


def test_info_counts_kept_requests_by_kind_streamed_or_not(burst: Trace, tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    want = {"API log": 2, "Conversation log": 1}
    assert file_info(path)["kinds"] == want  # streamed
    assert file_info(path, limit=4)["kinds"] == want  # in memory
    shown = CliRunner().invoke(app, ["info", str(path)]).stdout
    assert "API log 2, Conversation log 1, none 1" in shown
    rows = json.loads(CliRunner().invoke(app, ["head", str(path), "--json"]).stdout)
    assert [row["kind"] for row in rows] == spelled(burst.kind)


def test_kinds_are_part_of_a_traces_identity_only_where_there_are_any() -> None:
    trace = load("openhands").head(3)
    kind = Kinds(("a", "b"), np.array([0, 1, -1], np.int16))
    other = Kinds(("a", "b"), np.array([0, 1, 1], np.int16))
    digests = {columns_sha256(replace(trace, kind=k)) for k in (None, kind, other)}
    assert len(digests) == 3
    assert load("openhands").sha256 == columns_sha256(load("openhands"))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Kinds(("a",), np.zeros(2, np.int16)), "kind has 2 rows"),
        (Kinds(("a",), np.array([0, 1, 0], np.int16)), "a kind's code"),
        (Kinds(("a", "a"), np.zeros(3, np.int16)), "distinct names"),
        (Kinds(("",), np.zeros(3, np.int16)), "distinct names"),
    ],
)
def test_broken_kinds_are_named(kind: Kinds, rule: str) -> None:
    with pytest.raises(TraceError, match=rule):
        replace(load("openhands").head(3), kind=kind).check()


def test_odd_values_are_no_kinds_and_too_many_share_one() -> None:
    book = KindBook()
    for value in (None, "", "  ", 1.5, True, ["a"], {"a": 1}, 2**70):
        assert book.code(value) == -1, value
    assert book.code("  text ") == book.code("text") == 0
    assert book.code(7) == 1
    assert book.code("a\nb\ud800") == 2
    assert list(book.known) == ["text", "7", "a?b?"]
    assert len({book.code(f"k{k}") for k in range(2 * MAX_KINDS)}) == MAX_KINDS - 3 + 1
    assert len(book.known) == MAX_KINDS + 1
    assert list(book.known)[-1] == OTHER


texts = st.lists(st.sampled_from(["", "a", "b", " b", "c d", "é", "x" * 80]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, max_size=4), st.integers(0, 2**12 - 1))
def test_columns_of_parts_join_select_and_count_as_lists_do(parts: list[list[str]], mask: int) -> None:
    book, wanted, read = KindBook(), [], []
    for number, part in enumerate(parts):
        rows = np.array([bool(mask >> k & 1) for k in range(len(part))], bool)
        column = None if number == 1 else pa.array(part, pa.string())
        read.append((book.of_rows(column, rows), int(rows.sum())))
        wanted += [
            None if column is None else (text.strip()[:64] or None)
            for text, kept in zip(part, rows, strict=True)
            if kept
        ]
    kinds = joined(read)
    names = [name for name in wanted if name is not None]
    if not names:
        assert kinds is None
        return
    assert kinds is not None
    assert spelled(kinds) == wanted
    assert kinds.counts() == dict(Counter(names))
    assert list(kinds.counts().values()) == sorted(kinds.counts().values(), reverse=True)
    assert list(kinds.names) == list(dict.fromkeys(names))
    again = compact(kinds.names, kinds.codes)
    assert again is not None and spelled(again) == wanted
    assert spelled(kinds.take(np.arange(len(wanted))[::-1])) == wanted[::-1]


def test_a_damaged_column_of_kinds_is_refused(burst: Trace, tmp_path: Path) -> None:
    write_parquet(burst, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    nested = pa.array([[1]] * len(table), pa.list_(pa.int64()))
    spoilt = table.set_column(table.schema.get_field_index("kind"), "kind", nested)
    pq.write_table(spoilt.replace_schema_metadata(table.schema.metadata), tmp_path / "b.parquet")
    with pytest.raises(TraceError, match="is not a readable hisparsim trace"):
        load(tmp_path / "b.parquet")
