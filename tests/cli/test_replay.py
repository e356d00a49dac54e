import json
from pathlib import Path

import pytest
from fake_simulation import fake_simulate

import hisparsim
from hisparsim.cli.app import USER_ERROR, run
from hisparsim.cli.replay import DEFAULT_POLICIES, directory_names
from hisparsim.results.directory import find_runs, read_run

ROW_FIELDS = {
    "policy",
    "num_requests",
    "num_finished",
    "duration_s",
    "ttft_s",
    "tpot_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "mean_running",
    "num_preemptions",
    "h2d_bytes",
    "d2h_bytes",
    "hot_hit_rate",
    "resident_share",
    "offered_load",
    "bound_by",
    "wall_s",
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hisparsim, "simulate", fake_simulate, raising=False)
    monkeypatch.chdir(tmp_path)


def replay(*arguments: str) -> int:
    return run(["replay", "openhands", "--jobs", "1", *arguments])


def test_json_is_the_only_thing_on_stdout_and_has_the_promised_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay("--json", "--policy", "gpu-only", "--policy", "hybrid") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"trace", "runs"}
    assert [row["policy"] for row in document["runs"]] == ["gpu-only", "hybrid"]
    for row in document["runs"]:
        assert set(row) == ROW_FIELDS
        assert set(row["ttft_s"]) == set(row["tpot_s"]) == {"mean", "p50", "p90", "p99"}


def test_the_table_and_the_paragraph_go_to_stdout_and_progress_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay("--policy", "gpu-only", "--policy", "hybrid") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("policy")
    assert "output tok/s" in captured.out and "were replayed on glm-5.3" in captured.out
    assert "hybrid: simulated in" in captured.err
    assert max(len(line) for line in captured.out.splitlines()[:14]) <= 80


def test_out_holds_a_directory_a_policy_and_a_report_in_the_order_asked_for(tmp_path: Path) -> None:
    assert replay("--policy", "hybrid", "--policy", "gpu-only", "--out", "out/demo", "--seed", "3") == 0
    assert [path.name for path in find_runs(tmp_path / "out/demo")] == ["hybrid", "gpu-only"]
    assert (tmp_path / "out/demo/report/index.html").is_file()
    assert (tmp_path / "out/demo/report/ttft_cdf.png").is_file()
    scenario = read_run(tmp_path / "out/demo/hybrid").scenario
    seed = next(row for row in scenario["resolved"] if row["key"] == "seed")
    assert (seed["value"], seed["origin"]) == (3, "--set")


def test_an_existing_out_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hisparsim, "simulate", None)
    (tmp_path / "taken").mkdir()
    assert replay("--policy", "gpu-only", "--out", "taken") == USER_ERROR
    assert capsys.readouterr().err.startswith("error: taken: exists already")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "gpu-onyl"], "unknown policy 'gpu-onyl'"),
        (["--policy", "gpu-only", "--policy", "gpu-only"], "given twice"),
        (["--set", "kv.hot_row=1"], "did you mean 'kv.hot_rows'?"),
        (["--set", "kv.hot_rows"], "expected section.key=value"),
        (["--scenario", "none.toml"], "'none.toml' does not exist"),
        (["--policy", "mine.py:Mine"], "policy file 'mine.py' does not exist"),
    ],
)
def test_bad_flags_are_refused_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(*arguments) == USER_ERROR
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_a_trace_that_is_no_file_and_no_bundled_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "nowhere.jsonl", "--policy", "gpu-only"]) == USER_ERROR
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err


def test_a_scenario_that_names_a_policy_replays_that_one_and_none_the_four_main_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text('[policy]\nname = "gpu-only"\n')
    assert replay("--json", "--scenario", "mine.toml") == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["gpu-only"]
    assert replay("--json") == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)["runs"]] == list(DEFAULT_POLICIES)


def test_limit_and_check_reach_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay("--policy", "gpu-only", "--limit", "7", "--check", "--out", "run") == 0
    result = read_run(tmp_path / "run/gpu-only")
    assert result.num_requests == 7
    assert result.summary["checked"] is True


def test_directory_names_are_plain_and_never_taken_twice() -> None:
    assert directory_names(["hybrid", "a/b.py:Mine", "c.py:Mine", "report"]) == [
        "hybrid",
        "Mine",
        "Mine-2",
        "report-2",
    ]


def test_a_report_is_drawn_again_in_place_and_over_several_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay("--policy", "gpu-only", "--out", "a")
    replay("--policy", "gpu-only", "--out", "b", "--seed", "1")
    before = (tmp_path / "a/report/index.html").read_bytes()
    (tmp_path / "a/report/index.html").write_text("old")
    assert run(["report", "a"]) == 0
    assert (tmp_path / "a/report/index.html").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["gpu-only", "report", "runs.json"]
    assert run(["report", "a", "b"]) == USER_ERROR
    assert run(["report", "a", "b", "--out", "both"]) == 0
    page = (tmp_path / "both/index.html").read_text()
    assert "a/gpu-only" in page and "b/gpu-only" in page


def test_runs_are_compared_by_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay("--policy", "gpu-only", "--policy", "hybrid", "--out", "a")
    capsys.readouterr()
    assert run(["compare", "a"]) == 0
    assert "ttft_s.p50" in capsys.readouterr().out
    assert run(["compare", "a/gpu-only", "a/hybrid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["gpu-only", "hybrid"]
    assert run(["compare", "a/gpu-only"]) == USER_ERROR
    assert "two runs are needed, 1 were found" in capsys.readouterr().err
    (tmp_path / "m.json").write_text(
        json.dumps({"duration": 9.0, "output_throughput": 100.0, "mean_ttft_ms": 5.0, "completed": 60})
    )
    assert run(["compare", "a/hybrid", "--measured", "m.json"]) == 0
    shown = capsys.readouterr().out
    assert "measured (vLLM bench serve)" in shown and "note: TPOT" in shown
