"""Two Gloo ranks on a CPU: the same tokens as one, and a clear end when one of them dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hisparsim.results.directory import read_run
from hisparsim.results.records import RequestStatus

DYING = """
import os, signal, sys
from hisparsim_realrun import executor

run, steps = executor.Executor.run, [0]

def run_or_die(self, work):
    steps[0] += 1
    if steps[0] == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, work)

executor.Executor.run = run_or_die
from hisparsim_realrun.__main__ import main
main()
"""
SETTINGS = [
    "model.preset=tiny-dsa",
    "parallel.tp=1",
    "kv.dtype=bf16",
    "kv.host_pool_gib=0.02",
    "scheduler.max_num_seqs=4",
    "scheduler.max_num_batched_tokens=96",
    "scheduler.max_model_len=512",
    "workload.concurrency=3",
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def write_trace(folder: Path, num_requests: int) -> Path:
    path = folder / "trace.jsonl"
    rows = [
        {"timestamp": n, "input_length": 90 + 40 * n, "output_length": 12, "hash_ids": [n]}
        for n in range(num_requests)
    ]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def command(trace: Path, out: Path, policy: str, blocks: int, *more: str) -> list[str]:
    line = [sys.executable, "-m", "hisparsim_realrun", "realrun", str(trace), "--policy", policy]
    line += ["--layers", "3", "--experts", "2", "--threads", "1", "--selection", "model", "--json"]
    line += ["--out", str(out), "--set", f"kv.num_gpu_blocks={blocks}", *more]
    for setting in SETTINGS:
        line += ["--set", setting]
    return line


def start(lines: list[list[str]]) -> list[subprocess.Popen[str]]:
    """One process a line: a rank each, where there are several."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(lines))}
    processes = []
    for rank, line in enumerate(lines):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} if len(lines) > 1 else {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        processes.append(
            subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return processes


def answers(out: Path) -> list[tuple[int, int, int]]:
    import pyarrow.parquet as pq

    table = pq.read_table(out / "answers.parquet").to_pydict()
    return list(zip(table["request_id"], table["index"], table["token"], strict=True))


@pytest.mark.parametrize(("policy", "blocks"), [("hybrid", 40)])
def test_two_ranks_give_one_rank_s_tokens(policy, blocks, tmp_path):
    trace = write_trace(tmp_path, 5)
    runs = []
    for num_ranks in (1, 2):
        out = tmp_path / f"ranks{num_ranks}"
        for process in start([command(trace, out, policy, blocks, "--batch-invariant")] * num_ranks):
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
        assert (read_run(out).requests["status"] == int(RequestStatus.FINISHED)).all()
        runs.append(answers(out))
    assert len(runs[0]) == 5 * 12
    assert runs[0] == runs[1]


def test_a_dead_rank_ends_the_run_with_its_name_and_keeps_what_had_finished(tmp_path):
    trace, out = write_trace(tmp_path, 8), tmp_path / "dead"
    line = command(trace, out, "hybrid", 40)
    leader, follower = start([line, [sys.executable, "-c", DYING, *line[3:]]])
    _, errors = leader.communicate(timeout=120)
    follower.communicate()
    assert leader.returncode == 3, errors
    assert "rank 1 of 2 is gone" in errors
    statuses = read_run(out).requests["status"].tolist()
    assert int(RequestStatus.UNFINISHED) in statuses
    assert int(RequestStatus.FINISHED) in statuses


def test_an_error_before_the_first_step_lets_every_rank_go(tmp_path):
    trace, out = write_trace(tmp_path, 2), tmp_path / "never"
    for rank, process in enumerate(start([command(trace, out, "no-such-policy", 40)] * 2)):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == (2 if rank == 0 else 0), errors
    assert not out.exists()
