import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_sweeps import NUM_RUNS, NUM_SCENARIOS

from hisparsim.cli.app import INTERRUPTED, USER_ERROR, run

CRASHING_POLICY = """
import os
from pathlib import Path
from hisparsim.serving.policies.gpu_only import GpuOnly

class Dies(GpuOnly):
    name = "dies"
    def begin_step(self):
        mark = Path({mark!r})
        if {always} or not mark.exists():
            mark.touch()
            os._exit(9)
        super().begin_step()

class Raises(GpuOnly):
    name = "raises"
    def begin_step(self):
        raise RuntimeError("two\\nlines")
"""


def sweep(*arguments: str | Path) -> int:
    return run(["sweep", *map(str, arguments)])


def table(out: Path) -> bytes:
    return (out / "sweep.parquet").read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, trace_file: Path) -> Path:
    """An uninterrupted sweep, in one process."""
    from small_sweeps import SWEEP

    place = tmp_path_factory.mktemp("reference")
    (place / "sweep.toml").write_text(f'trace = "{trace_file}"\n{SWEEP}', encoding="utf-8")
    assert sweep(place / "sweep.toml", "--out", place / "out", "--jobs", "1") == 0
    return place / "out"


def test_identical_scenarios_are_run_once_and_each_has_its_row(reference: Path) -> None:
    rows = pq.ParquetFile(reference / "sweep.parquet").read().to_pylist()
    assert len(rows) == NUM_SCENARIOS
    assert len(list((reference / "runs").glob("*.parquet"))) == NUM_RUNS
    assert [row["policy"] for row in rows] == ["hybrid"] * 8 + ["gpu-only"] * 4
    assert all(row["kv.hot_rows"] is None for row in rows if row["policy"] == "gpu-only")
    twins = [row for row in rows if row["policy"] == "gpu-only" and row["workload.time_scale"] == 1.0]
    assert len({row["output_tokens_per_s"] for row in twins}) == 1
    assert any(row["pareto"] for row in rows)


def test_the_runs_are_a_parquet_dataset(reference: Path) -> None:
    found = pq.read_table(reference / "runs")
    assert found.num_rows == NUM_RUNS
    assert found.column("error").null_count == NUM_RUNS


def test_a_row_is_what_replay_says_of_the_scenario(
    reference: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pq.ParquetFile(reference / "sweep.parquet").read().to_pylist()
    row = next(r for r in rows if r["policy"] == "hybrid" and r["kv.hot_rows"] == 4096)
    sets = ["--set", "kv.hot_rows=4096", "--set", "kv.host_pool_gib=64", "--set", "workload.time_scale=0.5"]
    assert run(["replay", str(trace_file), "--policy", "hybrid", *sets, "--json", "--jobs", "1"]) == 0
    replayed = json.loads(capsys.readouterr().out)["runs"][0]
    assert row["kv.host_pool_gib"] == 64 and row["workload.time_scale"] == 0.5
    for name in ("output_tokens_per_s", "mean_running", "num_preemptions", "h2d_bytes", "bound_by"):
        assert row[name] == replayed[name]
    assert row["ttft_s.p99"] == replayed["ttft_s"]["p99"]


def test_two_processes_give_the_same_bytes_as_one(reference: Path, sweep_file: Path, tmp_path: Path) -> None:
    assert sweep(sweep_file, "--out", tmp_path / "out", "--jobs", "2") == 0
    assert table(tmp_path / "out") == table(reference)


def test_json_holds_axes_and_metrics_as_in_replay(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(sweep_file, "--json", "--jobs", "1", "--axis", "kv.host_pool_gib=64") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == []
    first = told["runs"][0]
    assert (first["policy"], first["kv.hot_rows"], first["kv.host_pool_gib"]) == ("hybrid", 2048, 64)
    assert {"mean", "p50", "p90", "p99"} <= set(first["ttft_s"])
    assert first["wall_s"] > 0


def started(sweep_file: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hisparsim.cli", "sweep", str(sweep_file), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def num_finished(out: Path) -> int:
    return len(list((out / "runs").glob("[!.]*.parquet")))


def wait_for_runs(process: subprocess.Popen[str], out: Path, wanted: int) -> None:
    limit = time.monotonic() + 120
    while process.poll() is None and num_finished(out) < wanted and time.monotonic() < limit:
        time.sleep(0.005)


def test_killed_while_the_report_was_drawn_it_is_drawn_again(
    reference: Path, sweep_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    (out / "report").rename(out / ".report.partial")
    (out / ".sweep.parquet.partial").write_bytes(b"PAR1")
    assert sweep(sweep_file, "--out", out, "--jobs", "1", "--resume") == 0
    assert (out / "report" / "index.html").is_file()
    assert table(out) == table(reference)
    assert list(out.glob(".*.partial")) == []


def test_killed_at_three_moments_and_resumed_it_repeats_nothing_and_ends_in_the_same_table(
    reference: Path, sweep_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    draw = random.Random(5)
    before: dict[str, int] = {}
    for wanted in (1, 3, 6):
        process = started(sweep_file, out, "--jobs", "2", "--resume")
        wait_for_runs(process, out, wanted)
        time.sleep(draw.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = {file.name: file.stat().st_ino for file in (out / "runs").glob("[!.]*.parquet")}
        assert before.items() <= now.items(), "a finished run was made again"
        before = now
    assert sweep(sweep_file, "--out", out, "--jobs", "1", "--resume") == 0
    now = {file.name: file.stat().st_ino for file in (out / "runs").glob("*.parquet")}
    assert before.items() <= now.items()
    assert table(out) == table(reference)
    assert (out / "report" / "index.html").is_file()


def test_a_killed_sweep_leaves_no_worker_behind(sweep_file: Path, tmp_path: Path) -> None:
    process = started(sweep_file, tmp_path / "out", "--jobs", "2")
    wait_for_runs(process, tmp_path / "out", 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("no /proc/PID/task/TID/children here to list workers by")
    workers = [int(pid) for pid in children.read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    limit = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_stops_cleanly_with_what_is_done(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = started(sweep_file, out, "--jobs", "2")
    wait_for_runs(process, out, 2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "--resume continues" in stderr
    assert num_finished(out) >= 2
    assert not (out / ".traces").exists()


def test_resume_on_a_missing_directory_starts_afresh(
    reference: Path, sweep_file: Path, tmp_path: Path
) -> None:
    assert sweep(sweep_file, "--out", tmp_path / "new", "--resume", "--jobs", "1") == 0
    assert table(tmp_path / "new") == table(reference)


def test_a_finished_sweep_resumed_makes_no_run(
    reference: Path, sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    monkeypatch.setattr("hisparsim.sweep.executors.run_task", lambda *_: pytest.fail("a run was made"))
    assert sweep(sweep_file, "--out", out, "--resume", "--jobs", "1") == 0
    assert table(out) == table(reference)


def test_objectives_may_change_between_two_calls(reference: Path, sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    sweep_file.write_text(sweep_file.read_text().replace("max = 1000", "max = 0.000001"))
    assert sweep(sweep_file, "--out", out, "--resume", "--jobs", "1") == 0
    assert not any(row["feasible"] for row in pq.ParquetFile(out / "sweep.parquet").read().to_pylist())


def test_a_run_file_that_a_disk_damaged_is_made_again(
    reference: Path, sweep_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    victim = sorted((out / "runs").glob("*.parquet"))[0]
    victim.write_bytes(victim.read_bytes()[:100])
    assert sweep(sweep_file, "--out", out, "--resume", "--jobs", "1") == 0
    assert table(out) == table(reference)


def test_a_failing_scenario_is_a_row_with_its_error(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(CRASHING_POLICY.format(mark=str(tmp_path / "mark"), always=False))
    arguments = ["--trace", str(trace_file), "--axis", f"policy=gpu-only,{policy}:Raises", "--jobs", "1"]
    assert sweep(*arguments, "--axis", "scheduler.max_num_seqs=8,100000", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["scheduler.max_num_seqs"] for run in told["runs"]] == [8]
    errors = [failed["error"] for failed in told["failed"]]
    assert "max_num_batched_tokens = 32768 is less than" in errors[0]
    assert "begin_step" in errors[1] and str(policy) in errors[1]
    assert errors[1].endswith("RuntimeError: two lines")


@pytest.mark.parametrize(("always", "num_failed"), [(False, 0), (True, 1)])
def test_a_worker_that_dies_takes_at_most_its_own_scenario_with_it(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], always: bool, num_failed: int
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(CRASHING_POLICY.format(mark=str(tmp_path / "mark"), always=always))
    axes = ["--axis", f"policy=gpu-only,{policy}:Dies,hybrid"]
    assert sweep("--trace", trace_file, *axes, "--jobs", "2", "--json", "--limit", "4") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == 3 - num_failed
    assert [failed["error"] for failed in told["failed"]] == [
        "its worker process died twice (out of memory, or killed)"
    ] * num_failed


def test_a_sweep_of_which_nothing_runs_is_an_error(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--trace", trace_file, "--axis", "kv.hot_rows=1,2", "--jobs", "1") == USER_ERROR
    assert "none of the 2 scenarios can be run; the first: kv.hot_rows = 1" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert sweep(*arguments) == USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_directories_that_cannot_be_used_are_one_line(
    reference: Path, sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    mine = tmp_path / "mine"
    shutil.copytree(reference, mine)
    assert "holds no sweep" in refused(capsys, sweep_file, "--out", other)
    assert "continue it with --resume" in refused(capsys, sweep_file, "--out", mine)
    changed = refused(capsys, sweep_file, "--out", mine, "--resume", "--axis", "kv.hot_rows=8192")
    assert "holds another sweep (its axes differs)" in changed
    assert "is a file" in refused(capsys, sweep_file, "--out", sweep_file)
    assert "give it with --out" in refused(capsys, sweep_file, "--resume")
    assert "known are grid, halving, optuna" in refused(capsys, sweep_file, "--search", "luck")
    assert "only --executor ray" in refused(capsys, sweep_file, "--address", "here:1")
    assert "no trace" in refused(capsys, "--axis", "policy=hybrid")
    assert "does not exist" in refused(capsys, tmp_path / "no.toml")
    assert (other / "thesis.txt").read_text() == "precious"


def test_two_sweeps_never_write_into_one_directory(
    sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hisparsim.sweep.definition import read_definition
    from hisparsim.sweep.plan import plan_sweep
    from hisparsim.sweep.store import SweepStore

    description, sha256 = plan_sweep(read_definition(sweep_file)).description()
    held = SweepStore(tmp_path / "out", description, sha256=sha256, resume=False)
    told = refused(capsys, sweep_file, "--out", tmp_path / "out", "--resume")
    assert "another hisparsim process is writing there" in told
    held.close()


def test_a_full_disk_is_one_line_and_keeps_what_is_done(
    reference: Path, sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        told = refused(capsys, sweep_file, "--out", disk / "out", "--jobs", "1")
        assert "No space left on device" in told
        kept = num_finished(disk / "out")
        assert 0 < kept < NUM_RUNS and f"{kept} finished runs are kept" in told
        os.sync()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert sweep(sweep_file, "--out", disk / "out", "--jobs", "1", "--resume") == 0
        assert table(disk / "out") == table(reference)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_dry_run_counts_and_estimates_and_writes_nothing(
    sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert sweep(sweep_file, "--dry-run", "--json", "--out", out, "--jobs", "2") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_scenarios"], told["num_runs"], told["jobs"]) == (NUM_SCENARIOS, NUM_RUNS, 2)
    assert told["seconds"] > 0
    assert not out.exists()


def test_several_traces_and_seeds_have_rows_of_their_own(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", trace_file, "--trace", "long-context", "--limit", "4"]
    arguments += ["--seed", "0", "--seed", "7"]
    assert sweep(*arguments, "--set", "workload.rate_per_s=1", "--json", "--jobs", "1") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["trace"], run["seed"]) for run in runs] == [
        ("small", 0), ("small", 7), ("long-context", 0), ("long-context", 7)
    ]  # fmt: skip
    assert runs[0]["duration_s"] != runs[1]["duration_s"]
