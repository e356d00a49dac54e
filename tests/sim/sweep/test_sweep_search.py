from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_sweeps import small_trace

from hisparsim.cli.app import run
from hisparsim.sweep.definition import Definition, parse_definition
from hisparsim.sweep.plan import plan_sweep
from hisparsim.sweep.runner import Execution, running
from hisparsim.sweep.search import Candidates, combine, prefixes, searched_rows, successive_halving
from hisparsim_traces import conversations
from hisparsim_traces.formats.own_parquet import write

AXES = """
[axes]
policy = ["hybrid", "gpu-only", "prefix-offload"]
"scheduler.max_num_seqs" = [1, 2, 4, 64]
"kv.hot_rows" = [2048, 4096]

[[when]]
key = "kv.hot_rows"
if = {"policy.name" = ["hybrid"]}

[objectives]
maximize = ["output_tokens_per_s"]
"""


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "long.parquet"
    write(small_trace(155, rate_per_s=6.0, tokens=900), path)
    return path


@pytest.fixture
def search_file(tmp_path: Path, long_trace: Path) -> Path:
    path = tmp_path / "search.toml"
    path.write_text(f'trace = "{long_trace}"\n{AXES}', encoding="utf-8")
    return path


def definition(trace: Path, **more: object) -> Definition:
    axes = {"policy": ["hybrid", "gpu-only"], "scheduler.max_num_seqs": [1, 2, 4, 8, 16, 64]}
    return parse_definition(
        {"trace": str(trace), "axes": axes, "objectives": {"maximize": ["output_tokens_per_s"]}, **more},
        Path(),
    )


def test_halving_keeps_a_third_for_three_times_the_requests(long_trace: Path) -> None:
    plan = plan_sweep(definition(long_trace))
    assert prefixes(plan, 12) == [51, None]
    with running(plan.shelf, Execution()) as runner:
        candidates = Candidates(plan, runner)
        verdicts = successive_halving(candidates)
        planned, told = searched_rows(candidates, verdicts)
        whole = [p for p, what in zip(planned, told["search"], strict=True) if what == "whole trace"]
        assert len(verdicts) == 12 and len(whole) == 4
        assert runner.num_made == 12 + 4
        full = plan_sweep(definition(long_trace))
        runner.run(full.tasks())
        best = max(full.tasks(), key=lambda task: float(str(runner.record(task)["output_tokens_per_s"])))
    assert best.fingerprint in [p.task.fingerprint for p in whole if p.task]


def test_what_breaks_a_constraint_on_a_prefix_is_pruned_and_says_why(long_trace: Path) -> None:
    limits = {"ttft_s.p50": {"max": 1.0}}
    plan = plan_sweep(definition(long_trace, constraints=limits))
    with running(plan.shelf, Execution()) as runner:
        verdicts = successive_halving(Candidates(plan, runner))
    reasons = {verdict.reason for verdict in verdicts.values()}
    assert "pruned: not ttft_s.p50 <= 1" in reasons
    assert "whole trace" in reasons


def test_a_prefix_of_a_closed_loop_keeps_the_load(tmp_path: Path) -> None:
    path = tmp_path / "chat.parquet"
    write(conversations(60, 4, 2000, 100, 5), path)
    plan = plan_sweep(definition(path, set={"workload.concurrency": 4}))
    first = prefixes(plan, 12)[0]
    assert first is not None
    assert (plan_sweep(definition(path)).traces[str(path)].head(first).parent < 0).sum() >= 8
    crowded = plan_sweep(definition(path, set={"workload.concurrency": 32}))
    assert prefixes(crowded, 12) == [None]


def test_seeds_of_a_candidate_are_averaged_and_one_error_fails_it() -> None:
    first, second = {"ttft_s.p50": 1.0, "error": None}, {"ttft_s.p50": 3.0, "error": None}
    names = {name: None for name in combine([{"error": "x"}])}
    assert combine([{**names, **first}, {**names, **second}])["ttft_s.p50"] == 2.0
    assert combine([{**names, **first}, {**names, "error": "wedged"}])["error"] == "wedged"


def test_a_search_is_the_same_with_two_processes_and_after_a_resume(
    search_file: Path, tmp_path: Path
) -> None:
    flags = ["sweep", str(search_file), "--search", "halving"]
    assert run([*flags, "--out", str(tmp_path / "one"), "--jobs", "1"]) == 0
    assert run([*flags, "--out", str(tmp_path / "two"), "--jobs", "2"]) == 0
    for victim in sorted((tmp_path / "two/runs").glob("*.parquet"))[::2]:
        victim.unlink()
    assert run([*flags, "--out", str(tmp_path / "two"), "--jobs", "2", "--resume"]) == 0
    assert (tmp_path / "one/sweep.parquet").read_bytes() == (tmp_path / "two/sweep.parquet").read_bytes()


def test_optuna_tries_the_same_combinations_whatever_the_number_of_processes(
    search_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'hisparsim[search]'")
    text = search_file.read_text() + 'minimize = ["ttft_s.p99"]\n[constraints]\n"ttft_s.p50" = {max = 1.0}\n'
    search_file.write_text(text)
    flags = ["sweep", str(search_file), "--search", "optuna", "--trials", "12"]
    for jobs in ("1", "2"):
        assert run([*flags, "--out", str(tmp_path / jobs), "--jobs", jobs]) == 0
    assert (tmp_path / "1/sweep.parquet").read_bytes() == (tmp_path / "2/sweep.parquet").read_bytes()
    rows = pq.ParquetFile(tmp_path / "1/sweep.parquet").read().to_pylist()
    assert len(rows) == 12
    assert {row["search"] == "whole trace" for row in rows} == {True, False}
    assert all((row["kv.hot_rows"] is None) == (row["policy"] != "hybrid") for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "conversation", "--axis", "policy=hybrid,gpu-only"], "a search needs [objectives]"),
        (["--trace", "conversation", "--trace", "openhands", "--limit", "2"], "a search plays one trace"),
    ],
)
def test_a_search_that_cannot_be_made_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", *flags, "--search", "halving", "--jobs", "1"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_a_missing_library_of_a_search_is_named_with_its_extra(
    search_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert run(["sweep", str(search_file), "--search", "optuna", "--jobs", "1"]) == 2
    assert "pip install 'hisparsim[search]'" in capsys.readouterr().err
