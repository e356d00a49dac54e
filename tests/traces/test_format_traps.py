"""The odd rows that real traces hold, each made here and loaded: kept, dropped or refused, never silently."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from odd_rows import AZURE, BURST, lines, mooncake

from hisparsim_traces import TraceError, detect, load


def test_failed_requests_are_dropped_with_a_count_and_never_clipped(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(BURST + "5,x,10,2,12,API log\n6,x,0,0,0,API log\n7,x,0,3,3,API log\n9,x,4,0,4,API log\n")
    trace = load(path)
    assert trace.loading.rows_read == 4
    assert trace.loading.rows_dropped == {
        "zero input and output tokens": 1,
        "zero input tokens": 1,
        "zero output tokens": 1,
    }
    assert trace.input_tokens.tolist() == [10]
    with pytest.raises(TraceError, match=r"a\.csv:3: zero input and output"):
        load(path, zero_tokens="error")
    with pytest.raises(TraceError, match=r"a\.csv:3"):
        load(path, strict=True)
    kept = load(path, zero_tokens="keep")
    assert kept.num_requests == 4
    with pytest.raises(TraceError, match="input_tokens >= 1"):
        kept.check()


def test_one_token_outputs_are_ordinary_requests(tmp_path: Path) -> None:
    trace = load(lines(tmp_path / "a.jsonl", [mooncake(0, 600, 1), mooncake(5, 600, 1)]))
    assert trace.output_tokens.tolist() == [1, 1]


def test_line_ends_blank_lines_and_a_missing_last_newline_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    body = ["2024-05-10 00:00:00,10,2", "", "2024-05-10 00:00:01,11,3", ""]
    path.write_bytes((AZURE.strip() + "\r\n" + "\r\n".join(body) + "2024-05-10 00:00:02,12,4").encode())
    trace = load(path)
    assert trace.input_tokens.tolist() == [10, 11, 12]
    assert trace.source_line.tolist() == [2, 4, 5]
    assert "1 blank lines passed over" in trace.loading.notes
    assert trace.loading.rows_read == 3


def test_header_names_with_spaces_and_inserted_columns_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        " Timestamp ,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,s,2,GPT-4,10,5,15,Conversation log\n19440120.0,s,1,GPT-4,20,5,25,Conversation log\n"
        "19440130.0,,1,GPT-4,7,5,12,API log\n"
    )
    trace = load(path)
    assert trace.arrival_s.tolist() == [0.0, 10.0, 20.0]
    assert trace.session.tolist() == [0, 0, -1]
    assert trace.think_s[1] == 8.0  # 10 s from start to start, of which the first turn took 2
    assert trace.shared_prefix_tokens.tolist() == [0, 15, 0]
    images = tmp_path / "b.csv"
    images.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01 00:00:00,9,10,2\n")
    assert load(images).input_tokens.tolist() == [10]
    assert detect(images) == "azure-multimodal"


def test_a_history_that_was_cut_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0,s,2,x,100,50,150,Conversation log\n10,s,1,x,60,5,65,Conversation log\n"
    )
    trace = load(path)
    assert trace.shared_prefix_tokens.tolist() == [0, 0]
    assert any("share none" in note for note in trace.loading.notes)


def test_numbers_as_strings_and_whole_floats_are_numbers(tmp_path: Path) -> None:
    trace = load(
        lines(
            tmp_path / "a.jsonl",
            [
                {"timestamp": "7", "input_length": 600.0, "output_length": "3", "hash_ids": [1, 2]},
                mooncake(1007, 5),
            ],
        ),
        format="mooncake",
    )
    assert trace.input_tokens.tolist() == [600, 5]
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_ids_above_32_bits_stay_apart(tmp_path: Path) -> None:
    big = 2**64 - 1
    path = lines(tmp_path / "a.jsonl", [mooncake(0, 600, 1, [5, big]), mooncake(1, 600, 1, [5, big % 2**32])])
    assert load(path).block_ids.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    "ids", [[1, -1], [1, 2**64], [1, 1.5], [1, "x"], [1, None], [[1], 2], "ab", 3, {"a": 1}]
)
def test_unreadable_ids_reject_their_row_alone(tmp_path: Path, ids: object) -> None:
    bad = {**mooncake(1, 600), "hash_ids": ids}
    trace = load(lines(tmp_path / "a.jsonl", [mooncake(0, 600), bad, mooncake(2, 600)]), format="mooncake")
    assert trace.source_line.tolist() == [1, 3]
    assert trace.loading.rows_dropped == {"unreadable hash_ids": 1}
    assert trace.block_ids.tolist() == [0, 1, 0, 1]


def test_missing_optional_keys_are_unknown_not_zero(tmp_path: Path) -> None:
    calls = [
        {"t": 0, "type": "n", "in": 128, "out": 5, "hash_ids": [1, 2], "stop": ""},
        {"t": 20, "type": "n", "in": 192, "out": 5, "hash_ids": [1, 2, 3]},
        {"t": 50, "type": "n", "in": 192, "out": 5, "hash_ids": [1, 2, 3], "think_time": 9.0},
    ]
    trace = load(lines(tmp_path / "w.jsonl", [{"id": "a", "hash_id_scope": "local", "requests": calls}]))
    assert np.isnan(trace.think_s[:2]).all()
    assert trace.think_s[2] == 9.0


def test_over_long_contexts_follow_their_policy_and_the_message_names_the_smallest_window(
    tmp_path: Path,
) -> None:
    rows = [mooncake(0, 1000, 10), mooncake(1, 2000, 10, [0, 9, 8, 7]), mooncake(2, 500, 200, [5])]
    path = lines(tmp_path / "a.jsonl", list(rows))
    with pytest.raises(TraceError, match=r"a\.jsonl:2: 1 of 3 .* smallest window that admits any: 700"):
        load(path, max_context_tokens=1500)
    skipped = load(path, max_context_tokens=1500, over_long="skip")
    assert skipped.input_tokens.tolist() == [1000, 500]
    assert skipped.loading.rows_dropped == {"over max_context_tokens": 1}
    cut = load(path, max_context_tokens=1500, over_long="truncate")
    cut.check()
    assert cut.input_tokens.tolist() == [1000, 1490, 500]
    assert cut.loading.changed == {"prompt truncated to max_context_tokens": 1}
    assert len(cut.blocks(1)) == 2  # whole blocks only: the cut one is shared with nobody
    with pytest.raises(TraceError, match=r"no request is left .* 700"):
        load(path, max_context_tokens=600, over_long="skip")
    short = load(path, max_context_tokens=150, over_long="truncate")
    assert short.loading.rows_dropped == {"output alone over max_context_tokens": 1}


def test_skipping_a_session_drops_all_of_it(tmp_path: Path) -> None:
    def conversation(lengths: list[int]) -> dict[str, object]:
        calls = [
            {"t": 10 * k, "type": "n", "in": n, "out": 5, "hash_ids": list(range(n // 64))}
            for k, n in enumerate(lengths)
        ]
        return {"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": calls}

    path = lines(tmp_path / "w.jsonl", [conversation([100, 5000, 200]), conversation([100, 300])])
    trace = load(path, max_context_tokens=1000, over_long="skip-session")
    assert trace.input_tokens.tolist() == [100, 300]
    assert trace.loading.rows_dropped == {
        "over max_context_tokens": 1,
        "session holds a row over max_context_tokens": 2,
    }
    skipped = load(path, max_context_tokens=1000, over_long="skip")
    skipped.check()
    assert skipped.input_tokens.tolist() == [100, 100, 300, 200]
    assert np.isnan(skipped.think_s).sum() == 4  # whose parent is gone: its pause is not known


def test_a_wrong_block_size_is_an_error_that_names_the_right_one(tmp_path: Path) -> None:
    rows = [mooncake(k, 320 + 64 * k, 1, list(range(5 + k))) for k in range(10)]
    path = lines(tmp_path / "a.jsonl", list(rows))
    with pytest.raises(TraceError, match="64 tokens a block would fit"):
        load(path, format="mooncake")
    trace = load(path, format="mooncake", block_tokens=64)
    assert trace.block_tokens == 64


def test_single_rows_that_break_the_block_rule_are_changed_and_counted(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 600),
        mooncake(1, 600, 1, [0, 1, 2]),
        mooncake(2, 1100, 1, [0, 1]),
        mooncake(3, 600),
        mooncake(4, 7),
    ]
    path = lines(tmp_path / "a.jsonl", list(rows))
    trace = load(path, format="mooncake")
    assert trace.loading.changed == {
        "more block ids than the prompt has blocks, cut off": 1,
        "fewer block ids than the prompt has blocks, the rest unshared": 1,
    }
    with pytest.raises(TraceError, match=r"a\.jsonl:2: more block ids"):
        load(path, format="mooncake", strict=True)


def test_floor_formats_cut_the_id_of_a_partial_tail(tmp_path: Path) -> None:
    calls = [
        {"t": 0, "in": 130, "out": 5, "hash_ids": [1, 2, 3]},
        {"t": 9, "in": 130, "out": 5, "hash_ids": [1, 2]},
    ]
    trace = load(
        lines(tmp_path / "w.jsonl", [{"block_size": 64, "hash_id_scope": "local", "requests": calls}])
    )
    assert np.diff(trace.block_offsets).tolist() == [2, 2]
    assert trace.loading.changed == {"id of the partial last block cut off": 1}


def test_cumulative_prompts_are_not_added_up(tmp_path: Path) -> None:
    row = {"type": "text", "output_length": 7}
    path = lines(
        tmp_path / "q.jsonl",
        [
            {
                **row,
                "chat_id": 1,
                "parent_chat_id": -1,
                "timestamp": 0.0,
                "input_length": 20,
                "turn": 1,
                "hash_ids": [1, 2],
            },
            {
                **row,
                "chat_id": 2,
                "parent_chat_id": 1,
                "timestamp": 9.5,
                "input_length": 40,
                "turn": 2,
                "hash_ids": [1, 3, 4],
            },
            {
                **row,
                "chat_id": 3,
                "parent_chat_id": 77,
                "timestamp": 10.0,
                "input_length": 40,
                "turn": 2,
                "hash_ids": [1, 3, 5],
            },
        ],
    )
    trace = load(path)
    assert trace.format == "bailian"
    assert trace.input_tokens.tolist() == [20, 40, 40]
    assert trace.parent.tolist() == [-1, 0, -1]
    assert trace.session.tolist() == [0, 0, 1]
    assert trace.block_tokens == 16
    assert any("parent is not in the file" in note for note in trace.loading.notes)


def test_sub_agents_run_on_their_own_clock_and_local_ids_stay_local(tmp_path: Path) -> None:
    nested = [
        {"t": 0, "in": 64, "out": 3, "hash_ids": [900], "api_time": 2},
        {"t": 5, "in": 128, "out": 3, "hash_ids": [900, 901], "api_time": 2},
    ]
    calls = [
        {"t": 0, "in": 64, "out": 3, "hash_ids": [1], "api_time": 2},
        {"t": 10.5, "type": "subagent", "agent_id": "a", "duration_ms": 8000, "requests": nested},
        {"t": 20, "in": 128, "out": 3, "hash_ids": [1, 2], "api_time": 2, "think_time": 18},
    ]
    conversation = {"id": "c", "block_size": 64, "hash_id_scope": "local", "requests": calls}
    trace = load(lines(tmp_path / "w.jsonl", [conversation, conversation]))
    trace.check()
    first = trace.session == 0
    assert trace.arrival_s[first].tolist() == [0.0, 2.5, 7.5, 20.0]
    assert trace.parent[first].tolist() == [-1, *(np.flatnonzero(first)[[0, 1, 2]].tolist())]
    assert trace.think_s[first][1:].tolist() == [0.5, 3.0, 9.5]
    assert len(np.unique(trace.block_ids)) == 8
    shared = {**conversation, "hash_id_scope": "global"}
    assert len(np.unique(load(lines(tmp_path / "g.jsonl", [shared, shared])).block_ids)) == 4


def test_duplicate_rows_are_real_traffic(tmp_path: Path) -> None:
    assert load(lines(tmp_path / "a.jsonl", [mooncake(0, 901, 17)] * 2)).num_requests == 2


def test_ids_that_stand_behind_different_prefixes_are_told_apart(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        [mooncake(0, 1000, 1, [1, 7]), mooncake(1, 1000, 1, [2, 7]), mooncake(2, 1000, 1, [1, 7])],
    )
    trace = load(path)
    assert trace.block_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert trace.loading.changed == {"ids seen behind different prefixes, told apart": 1}


def test_compressed_files_are_read_as_they_are(tmp_path: Path) -> None:
    plain = (json.dumps(mooncake(0, 600)) + "\n").encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "b.jsonl").write_bytes(zstandard.compress(plain))  # by content, not by name
    (tmp_path / "c.csv").write_bytes(gzip.compress((AZURE + "2024-05-10 00:00:00,10,2\n").encode()))
    for name in ("a.jsonl.gz", "b.jsonl", "c.csv"):
        assert load(tmp_path / name).num_requests == 1
    cut = gzip.compress(plain * 1000)[:-20]
    (tmp_path / "cut.jsonl.gz").write_bytes(cut)
    with pytest.raises(TraceError, match="damaged or cut-short"):
        load(tmp_path / "cut.jsonl.gz", format="mooncake")


def test_rows_with_a_wrong_number_of_fields_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        AZURE
        + "2024-05-10 00:00:00,10,2\n2024-05-10 00:00:01,10\n"
        + "2024-05-10 00:00:02,10,2,9\n2024-05-10 00:00:03,x,2\n"
    )
    trace = load(path)
    assert trace.loading.rows_dropped == {"wrong number of fields": 2, "unreadable ContextTokens": 1}
    with pytest.raises(TraceError, match=r"a\.csv:3: wrong number of fields \(2, not 3\)"):
        load(path, strict=True)


def test_files_that_are_no_trace_are_refused_in_one_line(tmp_path: Path) -> None:
    for name, content, message in (
        ("empty", b"", "is empty"),
        ("blank", b"\n \n", "is empty"),
        ("words", b"hello world\n", "no format known here"),
        ("binary", b"\x00\x01\x02" * 50, "is binary"),
        ("other.json", b'{"a": 1}', "no format known here"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=message) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="no such file, and no bundled trace of that name"):
        load(tmp_path / "absent")
    with pytest.raises(TraceError, match="unknown format 'moon': one of mooncake"):
        load(tmp_path / "words", format="moon")
