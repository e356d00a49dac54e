"""The less common formats: which field becomes what, and in which unit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hisparsim_traces import TraceError, detect, load


def lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dynamo(
    received_ms: int, length: int, session: str | None = None, total_ms: float | None = 400.0
) -> dict[str, object]:
    record: dict[str, object] = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": received_ms + 500,
        "request": {
            "request_id": f"r{received_ms}",
            "request_received_ms": received_ms,
            "output_tokens": 4,
            **({} if total_ms is None else {"total_time_ms": total_ms}),
            "replay": {
                "trace_block_size": 64,
                "input_length": length,
                "input_sequence_hashes": [2**63 + k for k in range(-(-length // 64))],
            },
        },
    }
    if session is not None:
        record["agent_context"] = {"session_id": session}
    return record


def test_dynamo_records_are_requests_with_64_bit_ids_and_an_embedded_block_size(tmp_path: Path) -> None:
    epoch = 1_715_299_201_500
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": epoch}
    path = lines(
        tmp_path / "d.jsonl",
        [
            dynamo(epoch, 100, "s"),
            tool,
            {"timestamp": 1, "event": dynamo(epoch + 1000, 200, "s", None)},
            dynamo(epoch + 5000, 200, "s"),
            dynamo(epoch + 9000, 64),
        ],
    )
    trace = load(path)
    trace.check()
    assert trace.format == "dynamo"
    assert trace.block_tokens == 64
    assert trace.arrival_s.tolist() == [0.0, 1.0, 5.0, 9.0]
    assert trace.parent.tolist() == [-1, 0, 1, -1]
    # the first took 400 ms by its own count, the second 500 ms by its end
    assert trace.think_s[1:3].tolist() == [pytest.approx(0.6), pytest.approx(3.5)]
    assert trace.blocks(1).tolist() == [0, 1, 2, 3]
    assert "events that are no requests (tools) are passed over" in trace.loading.notes


BLIS = (
    "request_id,client_id,tenant_id,slo_class,session_id,round_index,prefix_group,prefix_length,streaming,"
    "input_tokens,output_tokens,arrival_time_us,send_time_us,status,finish_reason\n"
)


def test_blis_counts_arrivals_in_microseconds_and_ignores_epoch_send_times(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        BLIS
        + "0,c,t,standard,s1,0,,0,false,10,5,0,1715299201500000,ok,\n"
        + "1,c,t,standard,s1,1,,0,false,30,5,2500000,1715299204000000,ok,\n"
        + "2,c,t,standard,,0,,0,false,30,5,3000000,1715299204000000,timeout,\n"
        + "3,c,t,standard,,0,,0,false,30,5,4000000,1715299204000000,ok,\n"
    )
    trace = load(path)
    assert trace.format == "blis"
    assert trace.arrival_s.tolist() == [0.0, 2.5, 4.0]
    assert trace.parent.tolist() == [-1, 0, -1]
    assert trace.loading.rows_dropped == {"status timeout": 1}


def test_llmservingsim_sessions_wait_for_their_tools_and_token_ids_give_prefixes(tmp_path: Path) -> None:
    shared = list(range(40))
    path = lines(
        tmp_path / "l.jsonl",
        [
            {"arrival_time_ns": 5_000_000_000, "input_toks": 40, "output_toks": 3, "input_tok_ids": shared},
            {
                "arrival_time_ns": 6_500_000_000,
                "input_toks": 50,
                "output_toks": 3,
                "input_tok_ids": [*shared, *range(10)],
            },
            {
                "session_id": "s",
                "arrival_time_ns": 7_000_000_000,
                "sub_requests": [
                    {"input_toks": 10, "output_toks": 2, "tool_duration_ns": 250_000_000},
                    {"input_toks": 30, "output_toks": 2, "tool_duration_ns": 0},
                ],
            },
            {"arrival_time_ns": 8_000_000_000, "input_toks": 41, "output_toks": 3, "input_tok_ids": shared},
        ],
    )
    trace = load(path)
    trace.check()
    assert trace.format == "llmservingsim"
    assert trace.arrival_s[:3].tolist() == [0.0, 1.5, 2.0]
    assert np.isnan(trace.arrival_s[3])
    assert trace.parent.tolist() == [-1, -1, -1, 2]
    assert trace.think_s[3] == 0.25
    assert trace.block_tokens == 16
    assert trace.blocks(0).tolist() == [0, 1]
    assert trace.blocks(1).tolist() == [0, 1, 2]
    assert trace.loading.rows_dropped == {"length of input_tok_ids": 1}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_plain_files_say_their_columns_and_units_with_a_map(tmp_path: Path, unit: str) -> None:
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    rows = [(2 * scale, 10, 3, "a"), (4 * scale, 20, 4, "a"), (5 * scale, 30, 5, "")]
    columns = {"arrival": f"when:{unit}", "input_tokens": "isl", "output_tokens": "osl", "session": "who"}
    table = {name: [row[k] for row in rows] for k, name in enumerate(("when", "isl", "osl", "who"))}
    csv_file, jsonl, parquet = tmp_path / "a.csv", tmp_path / "a.jsonl", tmp_path / "a.parquet"
    csv_file.write_text("who,when,isl,osl\n" + "".join(f"{w},{t},{i},{o}\n" for t, i, o, w in rows))
    lines(jsonl, [dict(zip(table, row, strict=True)) for row in rows])
    pq.write_table(pa.table(table), parquet)
    for path in (csv_file, jsonl, parquet):
        trace = load(path, columns=columns)
        trace.check()
        assert trace.arrival_s.tolist() == [0.0, 2.0, 3.0], path
        assert trace.input_tokens.tolist() == [10, 20, 30], path
        assert trace.session.tolist() == [0, 0, -1], path
        assert trace.parent.tolist() == [-1, 0, -1], path


def test_plain_files_with_wall_clock_or_without_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("when,isl,osl\n2024-01-01 00:00:00.5,10,3\n2024-01-01 00:00:02Z,20,4\n")
    columns = {"input_tokens": "isl", "output_tokens": "osl"}
    assert load(path, columns={"arrival": "when:datetime", **columns}).arrival_s.tolist() == [0.0, 1.5]
    assert load(path, columns=columns).arrival_s.tolist() == [0.0, 0.0]
    jsonl = lines(
        tmp_path / "a.jsonl", [{"when": "2024-01-01T00:00:00Z", "isl": 1, "osl": 1}, {"isl": 1, "osl": 1}]
    )
    trace = load(jsonl, columns={"arrival": "when:datetime", **columns})
    assert trace.loading.rows_dropped == {"no when": 1}


def test_plain_files_with_our_own_names_need_no_map(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0.25,10,3\n1.5,20,4\n")
    assert detect(path) == "csv"
    assert load(path).arrival_s.tolist() == [0.0, 1.25]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arival": "t", "input_tokens": "isl", "output_tokens": "osl"}, "map field 'arival'"),
        ({"input_tokens": "isl"}, "no column for output_tokens"),
        ({"arrival": "t:min", "input_tokens": "isl", "output_tokens": "osl"}, "unit 'min' of arrival"),
        ({"arrival": "t", "input_tokens": "isl", "output_tokens": "osl"}, "has no column 't'"),
    ],
)
def test_a_bad_map_is_named(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("when,isl,osl\n1,10,3\n")
    with pytest.raises(TraceError, match=message):
        load(path, columns=columns)


def test_mooncake_rows_with_sessions_wait_for_the_turn_before(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        [
            {"timestamp": 100, "session_id": "a", "input_length": 512, "output_length": 5, "hash_ids": [1]},
            {"delay": 250, "session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
            {"timestamp": 400, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        ],
    )
    trace = load(path)
    trace.check()
    assert trace.parent.tolist() == [-1, 0, -1]
    assert trace.think_s[1] == 0.25
    assert np.isnan(trace.arrival_s[1])


def test_options_a_format_does_not_take_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,2\n")
    with pytest.raises(TraceError, match="azure2023 does not take block_tokens"):
        load(path, block_tokens=16)
    with pytest.raises(TraceError, match="takes neither a format"):
        load("conversation", format="mooncake")
    with pytest.raises(TraceError, match="limit 0"):
        load(path, limit=0)
