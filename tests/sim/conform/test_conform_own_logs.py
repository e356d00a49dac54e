import json
from pathlib import Path
from typing import Any

import pytest
from own_logs import config, workload, write_log, write_rows

from hisparsim.cli.app import run
from hisparsim.conform.compare import run_conformance
from hisparsim.conform.workload import LogError, find_logs, read_log

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (workload(), config(True)),
    "sync": (workload(**{"async": False, "done_lag": 1}), config(True)),
    "slow-copies": (workload(enq_lag=2, done_lag=6, osl=70), config(True)),
    "small-host": (workload(osl=90), config(True, host_blocks=45)),
    "turns": (workload(turns=3, first=500, later=100, osl=30), config(True)),
    "turns-loaded": (
        workload(turns=3, first=500, later=100, osl=30, indexer_offload=True, load_lag=2, concurrency=9),
        config(True),
    ),
    "mix": (workload(mix=[[200, 30], [900, 20], [64, 50]]), config(True)),
    "drafts": (workload(mtp=2, accept=[2, 0, 1]), config(True)),
    "baseline": (workload(hisparse=False), config(False)),
    "baseline-turns": (workload(hisparse=False, turns=3, first=500, later=100, osl=30), config(False)),
    "baseline-drafts": (workload(hisparse=False, mtp=3, accept=[3, 1]), config(False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_log_of_our_own_is_equal_in_every_step(tmp_path: Path, name: str) -> None:
    rows = write_log(tmp_path, name, *CASES[name])
    verdict = run_conformance(read_log(tmp_path / f"{name}.json"), check=True)
    assert verdict.conforms
    assert verdict.num_equal_steps == verdict.num_steps == len(rows) > 20
    assert verdict.unknown_columns == ()
    assert all(logged == own for logged, own in verdict.totals.values())


def test_the_cases_meet_what_they_are_for(tmp_path: Path) -> None:
    seen = {name: write_log(tmp_path, name, *CASES[name]) for name in CASES}
    assert any(row["pages_lost"] for row in seen["plain"])
    assert any(row["stall_break"] for row in seen["slow-copies"])
    assert seen["small-host"][-1]["preemptions"] > 0
    assert seen["turns"][-1]["prefix_hit_tokens"] > 0
    assert seen["baseline-turns"][-1]["prefix_hit_tokens"] > 0


def test_the_command_prints_exactly_the_promised_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "baseline"):
        write_log(tmp_path, name, *CASES[name])
    assert run(["conform", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["workloads"]
    assert [entry["name"] for entry in document["workloads"]] == ["baseline", "plain"]
    for entry in document["workloads"]:
        fields = ["name", "policy", "num_steps", "num_equal_steps", "first_difference", "totals"]
        assert list(entry) == fields
        assert entry["num_steps"] == entry["num_equal_steps"]
        assert entry["first_difference"] is None


def test_a_planted_difference_is_found_and_shown_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_log(tmp_path, "plain", *CASES["plain"])
    rows[30]["free_gpu_blocks"] += 1
    write_rows(tmp_path / "plain.csv.gz", rows)
    assert run(["conform", str(tmp_path), "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["workloads"]
    free = rows[30]["free_gpu_blocks"]
    found = {"step": 30, "column": "free_gpu_blocks", "expected": free, "actual": free - 1}
    assert entry["first_difference"] == found
    assert entry["num_equal_steps"] == entry["num_steps"] - 1
    assert run(["conform", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 workloads equal" in out
    assert "first difference in step 30" in out
    assert "recent decisions, log:" in out and "recent decisions, own:" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("<--")] == ["free_gpu_blocks"]


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_run_that_ends_elsewhere_than_the_log_is_a_difference(tmp_path: Path, change: str) -> None:
    rows = write_log(tmp_path, "slow-copies", *CASES["slow-copies"])  # its last copies outlive its requests
    if change == "longer":
        rows.append({**rows[-1], "step": len(rows)})
    else:
        del rows[-1]
    write_rows(tmp_path / "slow-copies.csv.gz", rows)
    verdict = run_conformance(read_log(tmp_path / "slow-copies.json"))
    assert verdict.first_difference is not None
    assert verdict.first_difference.column == "step"


def test_of_a_log_that_was_cut_short_only_its_steps_count(tmp_path: Path) -> None:
    rows = write_log(tmp_path, "plain", *CASES["plain"])
    write_rows(tmp_path / "plain.csv.gz", rows[:25])
    verdict = run_conformance(read_log(tmp_path / "plain.json"))
    assert verdict.conforms and not verdict.is_complete
    assert verdict.num_equal_steps == 25


def test_a_wedged_log_is_compared_step_by_step(tmp_path: Path) -> None:
    work, sizes = workload(hisparse=False, isl=3900, osl=20), config(False)
    rows = write_log(tmp_path, "wedged", work, sizes, max_steps=50)
    assert {row["sched_reqs"] for row in rows} == {0}
    verdict = run_conformance(read_log(tmp_path / "wedged.json"))
    assert verdict.conforms
    assert verdict.num_equal_steps == 50


def test_a_column_that_means_nothing_here_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_log(tmp_path, "plain", *CASES["plain"])
    write_rows(tmp_path / "plain.csv.gz", [{**row, "temperature": 20} for row in rows])
    assert run(["conform", str(tmp_path)]) == 0
    assert "plain: not compared: temperature" in capsys.readouterr().out


def damage_json(path: Path, change: str) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    section, key = change.split(".")
    del document[section][key]
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("workload.async", "'workload' lacks 'async'"),
        ("workload.isl", "'workload' lacks 'isl'"),
        ("config.host_blocks", "'config' lacks 'host_blocks'"),
        ("cell", "invalid literal"),
        ("json", "log plain:"),
        ("gzip", "log plain:"),
        ("header", "lacks 'step'"),
        ("gap", "row 3 of plain.csv.gz is not step 3"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, message: str
) -> None:
    rows: list[dict[str, Any]] = list(write_log(tmp_path, "plain", *CASES["plain"]))
    table, document = tmp_path / "plain.csv.gz", tmp_path / "plain.json"
    if "." in damage:
        damage_json(document, damage)
    elif damage == "cell":
        write_rows(table, [{**rows[0], "running": "many"}])  # type: ignore[dict-item]
    elif damage == "json":
        document.write_text("{", encoding="utf-8")
    elif damage == "gzip":
        table.write_bytes(b"not compressed")
    elif damage == "header":
        write_rows(table, [{"steps": row["step"], "running": row["running"]} for row in rows])
    else:
        write_rows(table, rows[:3] + rows[4:])
    assert run(["conform", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]


def test_a_missing_folder_or_workload_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="is not a folder of decision logs"):
        find_logs(tmp_path / "absent")
    with pytest.raises(LogError, match="no decision log in"):
        find_logs(tmp_path)
    write_log(tmp_path, "plain", *CASES["plain"])
    with pytest.raises(LogError, match=r"no decision log named 'other' .*there are: plain"):
        find_logs(tmp_path, "other")


def test_a_prompt_with_two_output_lengths_needs_the_order(tmp_path: Path) -> None:
    work, sizes = CASES["mix"]
    write_log(tmp_path, "mix", work, sizes)
    document = json.loads((tmp_path / "mix.json").read_text(encoding="utf-8"))
    document["workload"]["mix"].append([200, 31])
    (tmp_path / "mix.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(LogError, match="2 output lengths in 'mix' go with a prompt of 200; add 'mix_order'"):
        run_conformance(read_log(tmp_path / "mix.json"))
