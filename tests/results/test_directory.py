import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import synthetic_run

from hisparsim.results import RunDirectoryError, RunResult
from hisparsim.results.directory import VARYING_FIELDS, find_runs, published, read_run, write_run
from hisparsim.results.metrics import run_row
from hisparsim.results.timeline import bin_timeline


def steady_fields(run_json: bytes) -> dict[str, object]:
    return {name: value for name, value in json.loads(run_json).items() if name not in VARYING_FIELDS}


@pytest.fixture(scope="module")
def result() -> RunResult:
    return synthetic_run(num_requests=60)


def test_a_run_is_read_back_as_it_was_written(result: RunResult, tmp_path: Path) -> None:
    write_run(result, tmp_path / "run")
    back = read_run(tmp_path / "run")
    assert run_row(back) == run_row(result)
    for table in ("requests", "steps"):
        written, read = getattr(result, table), getattr(back, table)
        assert list(written) == list(read)
        for name in written:
            assert np.array_equal(written[name], read[name]), name
    assert all(np.array_equal(a, b) for a, b in zip(result.itl, back.itl, strict=True))


def test_equal_results_give_equal_bytes(result: RunResult, tmp_path: Path) -> None:
    again = replace(synthetic_run(num_requests=60), wall_s=9.0)
    write_run(result, tmp_path / "a")
    write_run(again, tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["itl.parquet", "requests.parquet", "run.json", "steps.parquet", "timeline.parquet"]
    for name in names:
        first, second = ((tmp_path / run / name).read_bytes() for run in "ab")
        if name == "run.json":
            kept = [
                {k: v for k, v in json.loads(text).items() if k not in VARYING_FIELDS}
                for text in (first, second)
            ]
            assert kept[0] == kept[1]
        else:
            assert first == second, name


def test_an_existing_directory_is_never_written_over(result: RunResult, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(RunDirectoryError, match="exists already"):
        write_run(result, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), published(tmp_path / "run") as directory:
        (directory / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_directory_of_that_name(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from hisparsim.results.directory import published\n"
        "with published(Path(sys.argv[1])) as directory:\n"
        "    (directory / 'run.json').write_text('{}')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunDirectoryError, match="holds no run directory"):
        find_runs(tmp_path)


def test_directories_that_are_no_runs_are_refused_by_name(result: RunResult, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"not a run directory"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"not JSON"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"a": 1}')
    with pytest.raises(RunDirectoryError, match=r"not the description of a hisparsim run"):
        read_run(tmp_path)
    write_run(result, tmp_path / "run")
    (tmp_path / "run" / "steps.parquet").unlink()
    with pytest.raises(RunDirectoryError, match=r"steps.parquet: missing"):
        read_run(tmp_path / "run")


DAMAGED = {
    "cut run.json": ("run.json", b'{"format": "hisparsim-run"', "not JSON"),
    "binary run.json": ("run.json", bytes(range(128, 256)), "not JSON"),
    "no version": ("run.json", b'{"format": "hisparsim-run"}', "format version None"),
    "nothing but a version": (
        "run.json",
        b'{"format": "hisparsim-run", "format_version": 1}',
        "policy is missing",
    ),
    "cut table": ("requests.parquet", b"PAR1" + bytes(90), "damaged or cut short"),
    "binary table": ("itl.parquet", bytes(range(256)), "damaged or cut short"),
    "listing": ("runs.json", b"{", "not JSON"),
    "listing of another kind": ("runs.json", b"5", "not a list"),
}


@pytest.mark.parametrize("kind", list(DAMAGED))
def test_a_damaged_run_is_refused_in_one_line_that_names_the_file(
    kind: str, result: RunResult, tmp_path: Path
) -> None:
    name, content, said = DAMAGED[kind]
    write_run(result, tmp_path / "runs" / "one")
    listing = name == "runs.json"
    (tmp_path / "runs" / name if listing else tmp_path / "runs" / "one" / name).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=said) as refusal:
        if listing:
            find_runs(tmp_path / "runs")
        else:
            read_run(tmp_path / "runs" / "one")
    assert name in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_timeline_keeps_every_token_byte_and_request_second(result: RunResult) -> None:
    timeline = bin_timeline(result, 97)
    steps, requests = result.steps, result.requests
    for name in ("decode_tokens", "prefill_tokens", "h2d_bytes", "d2h_bytes"):
        assert timeline[name].sum() == pytest.approx(steps[name].sum())
    running = (steps["running"] * steps["duration_ns"]).sum() / 1e9
    assert (timeline["running"] * timeline["width_s"]).sum() == pytest.approx(running)
    in_system = (requests["finish_ns"] - requests["arrival_ns"]).sum() / 1e9
    assert (timeline["in_system"] * timeline["width_s"]).sum() == pytest.approx(in_system)


def test_a_bin_holds_the_mean_over_its_own_time(result: RunResult) -> None:
    timeline = bin_timeline(result, 50)
    start = result.steps["start_ns"] / 1e9
    end = start + result.steps["duration_ns"] / 1e9
    for bin_start, width, waiting in zip(
        timeline["start_s"], timeline["width_s"], timeline["waiting"], strict=True
    ):
        overlap = np.clip(np.minimum(end, bin_start + width) - np.maximum(start, bin_start), 0, None)
        assert waiting == pytest.approx((overlap * result.steps["waiting"]).sum() / width, abs=1e-9)
