"""Figures taken in a stream equal those of the trace in memory; large files stay fast and small in memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim_traces import TraceError, files, load, reuse_stream
from hisparsim_traces.formats import FORMATS
from hisparsim_traces.loading import apply_zero_tokens
from hisparsim_traces.reuse_stream import IdSet
from hisparsim_traces.statistics import trace_info
from hisparsim_traces.streaming import stream_info
from hisparsim_traces.writing import write_mooncake


def write_rows(path: Path, n: int, seed: int, *, disorder: bool = False) -> Path:
    rng = np.random.default_rng(seed)
    time_s = np.cumsum(rng.exponential(0.7, n) * (rng.random(n) < 0.8))
    if disorder:
        time_s = np.concatenate([time_s[n // 2 :], time_s[: n // 2]])
    inputs, outputs = rng.integers(0, 40_000, n), rng.integers(0, 30, n)
    inputs[rng.random(n) < 0.001] = 3_000_000
    with path.open("w") as file:
        file.write("arrival_s,input_tokens,output_tokens\n")
        for row in zip(time_s.tolist(), inputs.tolist(), outputs.tolist(), strict=True):
            file.write("{:.6f},{},{}\n".format(*row))
            if rng.random() < 0.001:
                file.write("x,1\n\n")
    return path


def near(a: object, b: object) -> bool:
    return a == pytest.approx(b, rel=1e-9) if isinstance(b, float) else a == b


@pytest.mark.parametrize("disorder", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5000, 120_000])
def test_a_stream_gives_the_same_figures_as_memory(tmp_path: Path, n: int, disorder: bool) -> None:
    path = write_rows(tmp_path / "a.csv", n, seed=n + 5, disorder=disorder)
    recorded = load(path, zero_tokens="keep")
    memory = trace_info(recorded, apply_zero_tokens(recorded, "drop", False, path))
    stream = stream_info(path, FORMATS["csv"])
    assert stream.keys() == memory.keys()
    for key, value in memory.items():
        if isinstance(value, dict):
            assert stream[key].keys() == value.keys(), key
            for name, figure in value.items():
                assert near(stream[key][name], figure), (key, name)
        else:
            assert near(stream[key], value), key


@pytest.mark.parametrize("name", ["conversation", "tool-agent"])
def test_a_stream_counts_reuse_as_memory_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 14)  # many chunks
    trace = load(name)
    mask = np.arange(trace.num_requests) % 7 == 0
    trace = replace(trace, output_tokens=np.where(mask, 0, trace.output_tokens))
    path = tmp_path / "a.jsonl"
    write_mooncake(trace, path)
    recorded = load(path, zero_tokens="keep")
    memory = trace_info(recorded, apply_zero_tokens(recorded, "drop", False, path))
    stream = stream_info(path, FORMATS["mooncake"])
    for key in ("block_tokens", "ideal_block_reuse", "ideal_token_reuse", "reuse_by_cache", "rows_dropped"):
        assert stream[key] == memory[key], key
    monkeypatch.setattr(reuse_stream, "MAX_ACCESSES", 10_000)
    sampled = stream_info(path, FORMATS["mooncake"])
    assert sampled["ideal_block_reuse"] == memory["ideal_block_reuse"]
    assert sampled["reuse_by_cache"]["exact"] is False
    assert 0.1 < sampled["reuse_by_cache"]["sample"] < 1
    for size, share in zip(
        memory["reuse_by_cache"]["cache_blocks"], memory["reuse_by_cache"]["hit_share"], strict=True
    ):
        near_size = np.interp(
            size, sampled["reuse_by_cache"]["cache_blocks"], sampled["reuse_by_cache"]["hit_share"]
        )
        assert near_size == pytest.approx(share, abs=0.1)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=30), max_size=20))
def test_id_sets_hold_what_was_added(batches: list[list[int]]) -> None:
    held: set[int] = set()
    ids = IdSet()
    for batch in batches:
        asked = np.unique(np.array(batch, np.uint64))
        assert ids.holds(asked).tolist() == [one in held for one in asked.tolist()]
        ids.add(asked[~ids.holds(asked)])
        held.update(batch)
        assert len(ids) == len(held)


def test_strict_streams_refuse_the_first_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n1,0,0\n")
    with pytest.raises(TraceError, match=r"a\.csv:3: zero input and output"):
        stream_info(path, FORMATS["csv"], strict=True)


@pytest.mark.slow
def test_two_million_rows_take_little_memory_and_time(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    rng = np.random.default_rng(0)
    block = "".join("{},{},{}\n".format(k, *rng.integers(1, 8000, 2)) for k in range(100_000))
    with path.open("w") as file:
        file.write("arrival_s,input_tokens,output_tokens\n")
        for _ in range(20):
            file.write(block)
    script = (
        "import resource, sys; from hisparsim_traces.statistics import file_info;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "rows = file_info(sys.argv[1])['rows_read'];"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(rows, (used.ru_maxrss - before) // 1024, used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    rows, mib, cpu_s = map(float, done.stdout.split())
    assert rows == 2_000_000
    assert mib < 300
    assert rows / cpu_s > 200_000  # processor time, imports included: the clock on the wall counts neighbours


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", 50_000, seed=1)
    with path.open("a") as file:
        file.write("not,a,row\n" * 100)
    start = load(path, limit=25)
    whole = load(path)
    assert start.num_requests == 25
    assert start.loading.rows_read < 60
    assert start.input_tokens.tolist() == whole.input_tokens[:25].tolist()
    assert start.loading.rows_read == start.loading.rows_kept + sum(start.loading.rows_dropped.values())
