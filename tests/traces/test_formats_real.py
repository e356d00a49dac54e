"""Every public excerpt loads, and its totals are those counted independently (EXPECTED.json)."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hisparsim_traces import detect, load
from hisparsim_traces.reuse import ideal_reuse
from hisparsim_traces.statistics import file_info
from hisparsim_traces.writing import write_mooncake, write_parquet

FORMATS = {
    "azure2023": "azure2023",
    "mooncake": "mooncake",
    "burstgpt": "burstgpt",
    "ragpulse": "ragpulse",
    "weka": "weka",
    "servegen": "servegen",
}


@pytest.fixture(scope="module")
def traces_dir(reference_dir: Path) -> Path:
    folder = reference_dir / "traces"
    if not (folder / "EXPECTED.json").exists():
        pytest.skip(f"no public trace excerpts in {folder}")
    return folder


@pytest.fixture(scope="module")
def expected(traces_dir: Path) -> dict[str, dict[str, Any]]:
    every = json.loads((traces_dir / "EXPECTED.json").read_text())
    return every


def test_every_excerpt_is_recognised_by_its_content(traces_dir: Path, expected: dict[str, Any]) -> None:
    for name in expected:
        assert detect(traces_dir / name) == FORMATS[name.split("/")[0]], name


def test_totals_arrivals_and_reuse_equal_the_independent_count(
    traces_dir: Path, expected: dict[str, Any]
) -> None:
    for name, want in expected.items():
        info = file_info(traces_dir / name)
        assert info["sha256"] == want["sha256"], name
        assert info["rows_read"] == info["rows_kept"] + sum(info["rows_dropped"].values()), name
        if name.startswith("servegen"):
            continue
        calls = want.get("top_level_requests", 0) + want.get("nested_requests", 0)
        assert info["rows_read"] == want.get("rows", calls), name
        assert info["sum_input_tokens"] == want.get("sum_isl", want.get("sum_in")), name
        assert info["sum_output_tokens"] == want.get("sum_osl", want.get("sum_out")), name
        if "rows" in want:
            assert info["span_s"] == pytest.approx(want["span_s"], abs=1e-6), name
            assert info["rate_per_s"] == pytest.approx(want["rate_rps"], abs=5.1e-5), name
            assert info["interarrival_cv"] == pytest.approx(want["iat_cv"], abs=5.1e-4), name
            assert info["inversions"] == want["out_of_order"], name
            assert info["ties"] == want["ties"], name
        reuse = want.get("ideal_block_hit", want.get("ideal_block_hit_per_conv_scope"))
        if reuse is not None:
            assert info["ideal_block_reuse"] == pytest.approx(reuse, abs=5.1e-7), name
        if "ideal_token_hit" in want:
            assert info["ideal_token_reuse"] == pytest.approx(want["ideal_token_hit"], abs=5.1e-7), name


def test_failed_and_sessionless_rows_are_counted(traces_dir: Path, expected: dict[str, Any]) -> None:
    for name, want in expected.items():
        trace = load(traces_dir / name)
        trace.check()
        if "zero_zero_rows" in want:
            assert trace.loading.rows_dropped.get("zero input and output tokens", 0) == want["zero_zero_rows"]
        if "zero_out" in want:
            assert trace.loading.rows_dropped.get("zero output tokens", 0) == want["zero_out"]
        if "conversations" in want:
            assert trace.num_sessions == want["conversations"]
            assert trace.input_tokens.max() == want["max_in"]
        if "sessions" in want:
            assert trace.num_sessions == want["sessions"]
        if "blank_session" in want:
            assert (trace.session == -1).sum() == want["blank_session"]
        if "unique" in want:
            assert len(np.unique(trace.block_ids)) == want["unique"]
            assert len(trace.block_ids) == want["blocks"]


def test_azure_rows_equal_a_plain_csv_reader(traces_dir: Path) -> None:
    for path in (traces_dir / "azure2023").glob("*.csv"):
        trace = load(path)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert trace.input_tokens.tolist() == [int(row["ContextTokens"]) for row in rows]
        assert trace.output_tokens.tolist() == [int(row["GeneratedTokens"]) for row in rows]
        stamps = [
            # 7 digits: microseconds and one digit more
            datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
            for row in rows
        ]
        assert np.abs(trace.arrival_s - (np.array(stamps) - stamps[0])).max() < 2e-6
        assert (np.diff(trace.arrival_s) > 0).all()  # no two arrivals collapse onto one tick


def test_mooncake_prefixes_equal_a_plain_reader(traces_dir: Path) -> None:
    for path in (traces_dir / "mooncake").glob("*.jsonl"):
        trace = load(path)
        names: dict[int, int] = {}
        for row, line in enumerate(path.read_text().splitlines()):
            ids = [names.setdefault(one, len(names)) for one in json.loads(line)["hash_ids"]]
            assert trace.blocks(row).tolist() == ids


def test_weka_calls_equal_a_plain_walk(traces_dir: Path) -> None:
    path = traces_dir / "weka" / "weka_cc_sample.jsonl.gz"
    trace = load(path, zero_tokens="keep")

    def calls(requests: list[dict[str, Any]]) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = []
        for request in requests:
            out += calls(request["requests"]) if "requests" in request else [(request["in"], request["out"])]
        return out

    seen: list[tuple[int, int]] = []
    with gzip.open(path, "rt") as file:
        for line in file:
            seen += calls(json.loads(line)["requests"])
    order = np.argsort(trace.source_line)
    assert (
        list(zip(trace.input_tokens[order].tolist(), trace.output_tokens[order].tolist(), strict=True))
        == seen
    )


def test_weka_sub_agents_are_waited_for_and_their_time_is_not_counted_twice(traces_dir: Path) -> None:
    trace = load(traces_dir / "weka" / "weka_cc_sample.jsonl.gz", zero_tokens="keep")
    with gzip.open(traces_dir / "weka" / "weka_cc_sample.jsonl.gz", "rt") as file:
        conversations = [json.loads(line) for line in file]
    number = next(k for k, c in enumerate(conversations) if c["id"] == "trace_0274")
    first_line = 1 + sum(
        len(r["requests"]) if "requests" in r else 1 for c in conversations[:number] for r in c["requests"]
    )
    row_of = {int(line): row for row, line in enumerate(trace.source_line)}
    after = row_of[first_line + 49]  # behind the first call and 11 + 13 + 24 nested ones
    assert trace.arrival_s[after] == 323.0
    # the third sub-agent ended last, at 300.351 s, while the recorded think time of 304 s spans all three
    assert trace.think_s[after] == pytest.approx(323.0 - 300.351, abs=1e-6)
    assert trace.source_line[trace.parent[after]] == first_line + 48
    launched = row_of[first_line + 1]
    assert trace.parent[launched] == row_of[first_line]
    assert trace.arrival_s[launched] == pytest.approx(160.959 - 141.487, abs=1e-6)


def test_servegen_draws_the_rates_of_its_windows(traces_dir: Path) -> None:
    path = traces_dir / "servegen" / "deepseek-r1_chunk-3-trace.csv"
    with path.open() as file:
        windows = [(float(row[0]), float(row[1]) * 600) for row in csv.reader(file)]
    wanted = sum(requests for _, requests in windows)
    drawn = load(path, zero_tokens="keep", seed=1)
    assert drawn.num_requests == pytest.approx(wanted, rel=0.05)
    assert load(path, zero_tokens="keep", seed=1).input_tokens.tolist() == drawn.input_tokens.tolist()
    short = load(
        path,
        zero_tokens="keep",
        seed=1,
        duration_s=next(start for start, requests in windows if requests) + 900,
    )
    assert 0 < short.num_requests < drawn.num_requests


def test_folders_of_sessions_and_clients_are_one_trace(traces_dir: Path) -> None:
    weka = load(traces_dir / "weka")
    weka.check()
    assert weka.num_sessions == 33
    assert weka.loading.rows_read == 1077
    clients = load(traces_dir / "servegen", seed=2)
    clients.check()
    assert clients.format == "servegen"


def test_a_conversation_over_several_lines_or_in_a_list_is_the_same(traces_dir: Path, tmp_path: Path) -> None:
    one = load(traces_dir / "weka" / "trace_0574.json")
    content = json.loads((traces_dir / "weka" / "trace_0574.json").read_text())
    for name, text in (
        ("pretty.json", json.dumps(content, indent=1)),
        ("list.json", json.dumps([content], indent=1)),
    ):
        (tmp_path / name).write_text(text)
        other = load(tmp_path / name)
        assert other.input_tokens.tolist() == one.input_tokens.tolist()
        assert other.block_ids.tolist() == one.block_ids.tolist()
        assert np.array_equal(other.think_s, one.think_s, equal_nan=True)


def test_real_prefixes_and_times_survive_mooncake_and_parquet(traces_dir: Path, tmp_path: Path) -> None:
    for path in (traces_dir / "mooncake").glob("*.jsonl"):
        trace = load(path)
        write_mooncake(trace, tmp_path / "a.jsonl")
        write_parquet(trace, tmp_path / "a.parquet")
        for back in (load(tmp_path / "a.jsonl"), load(tmp_path / "a.parquet")):
            assert back.block_ids.tolist() == trace.block_ids.tolist()
            assert back.block_offsets.tolist() == trace.block_offsets.tolist()
            assert back.input_tokens.tolist() == trace.input_tokens.tolist()
            assert back.output_tokens.tolist() == trace.output_tokens.tolist()
            assert np.abs(back.arrival_s - trace.arrival_s).max() < 1e-6  # stamps are whole milliseconds
    weka = load(traces_dir / "weka" / "weka_cc_sample.jsonl.gz")
    write_mooncake(weka, tmp_path / "w.jsonl")
    back = load(tmp_path / "w.jsonl")
    assert back.input_tokens.tolist() == weka.input_tokens.tolist()
    assert np.abs(back.arrival_s - weka.arrival_s).max() <= 5.1e-4
    # of blocks of 512 tokens no more can be shared than of the 64-token blocks they are made of
    fine, coarse = ideal_reuse(weka).tokens, ideal_reuse(back).tokens
    assert fine - 0.01 < coarse <= fine
