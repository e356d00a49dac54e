"""Every trace command does its work, prints JSON where asked, and meets bad input with one line and exit
code 2.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hisparsim_traces import load
from hisparsim_traces.cli import app
from hisparsim_traces.topk import TopkWriter

runner = CliRunner()


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if not code else result.stderr


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + "".join(f"{k},x,{10 + k},{k % 7},{0},API log\n" for k in range(100))
    )
    return path


def test_info_prints_the_agreed_keys(burst: Path) -> None:
    info = json.loads(run("info", str(burst), "--json"))
    assert info["format"] == "burstgpt"
    assert info["rows_read"] == 100
    assert info["rows_kept"] == info["num_requests"] == 85
    assert info["rows_dropped"] == {"zero output tokens": 15}
    assert info["sum_input_tokens"] == sum(10 + k for k in range(100))
    assert info["span_s"] == 99.0
    assert info["rate_per_s"] == pytest.approx(100 / 99)
    assert info["sum_output_tokens"] == sum(k % 7 for k in range(100))
    assert info["interarrival_cv"] == 0.0
    assert info["block_tokens"] is info["ideal_block_reuse"] is None
    assert info["num_sessions"] == 0
    assert info["input_tokens"]["max"] == 109
    for side in ("input_tokens", "output_tokens"):
        assert set(info[side]) >= {"p50", "p90", "p99", "max"}
    with_blocks = json.loads(run("info", "conversation", "--json"))
    assert list(with_blocks) == list(info)  # the same keys, whether a file is streamed or not
    assert with_blocks["block_tokens"] == 512
    assert with_blocks["ideal_block_reuse"] == pytest.approx(0.3536, abs=5e-5)
    assert with_blocks["sha256"] == load("conversation").sha256
    assert "100 read, 85 kept; 15 zero output tokens" in run("info", str(burst))
    start = json.loads(run("info", str(burst), "--json", "--limit", "12"))
    assert (start["num_requests"], start["rows_read"], start["rows_kept"]) == (12, 14, 12)


def test_info_of_a_bundled_trace_shows_reuse_and_draws_figures(tmp_path: Path) -> None:
    assert "ideal reuse" in run("info", "conversation", "--plot", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"traces-conversation-{kind}.png" for kind in ("lengths", "load", "reuse")
    }
    sampled = json.loads(run("info", "conversation", "--json", "--reuse-sample", "0.3"))
    assert sampled["reuse_by_cache"]["exact"] is False


def test_head_shows_the_first_requests(burst: Path) -> None:
    rows = json.loads(run("head", str(burst), "-n", "3", "--json"))
    assert [row["input_tokens"] for row in rows] == [11, 12, 13]
    assert rows[0]["session"] is None
    assert run("head", "openhands", "-n", "2").count("\n") == 3


def test_slices_and_conversions_can_be_read_again(tmp_path: Path) -> None:
    part, parquet = tmp_path / "part.jsonl", tmp_path / "part.parquet"
    run("slice", "conversation", str(part), "--start", "100", "--end", "400", "--time-scale", "0.5")
    trace, whole = load(part), load("conversation")
    inside = (whole.arrival_s >= 100) & (whole.arrival_s < 400)
    assert trace.num_requests == inside.sum()
    assert trace.span_s == pytest.approx(np.ptp(whole.arrival_s[inside]) / 2, abs=2e-3)
    run("convert", str(part), str(parquet))
    assert load(parquet).input_tokens.tolist() == trace.input_tokens.tolist()
    run("convert", str(part), str(tmp_path / "c.jsonl"), "--max-context", "20000", "--over-long", "skip")
    assert (load(tmp_path / "c.jsonl").input_tokens < 20_000).all()
    assert {path.name for path in tmp_path.iterdir()} == {"part.jsonl", "part.parquet", "c.jsonl"}


def test_fit_then_synth_draws_a_similar_trace(tmp_path: Path) -> None:
    law, out = tmp_path / "law.json", tmp_path / "out.jsonl"
    report = json.loads(run("fit", "tool-agent", str(law), "--json"))
    assert report["input_tokens_ks"] < 0.06
    assert "input_tokens_ks" in run("fit", "tool-agent", str(law))
    run("synth", str(law), str(out), "-n", "300", "--seed", "9", "--rate", "5")
    drawn = load(out)
    assert drawn.num_requests == 300
    assert 300 / drawn.span_s == pytest.approx(5, rel=0.3)
    run("synth", "conversation", str(tmp_path / "again.parquet"))
    assert (
        load(tmp_path / "again.parquet").input_tokens.tolist() == load("conversation").input_tokens.tolist()
    )


def test_the_catalogue_is_listed(tmp_path: Path) -> None:
    assert "Apache-2.0" in run("catalogue")
    assert any(entry["name"] == "burstgpt-1" for entry in json.loads(run("catalogue", "--json")))


def test_selections_are_described(tmp_path: Path) -> None:
    with TopkWriter(tmp_path / "a.topk", top_k=4, num_groups=1) as writer:
        writer.append(0, 0, 0, 10, [1, 2, 3])
        writer.append(1, 0, 0, 11, [2, 3, 4])
    assert json.loads(run("topk", str(tmp_path / "a.topk")))["step_overlap"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "absent.csv"], "no such file"),
        (["info", "{burst}", "--format", "nope"], "unknown format 'nope'"),
        (["info", "{burst}", "--map", "arrival"], "must be FIELD=COLUMN"),
        (["info", "{burst}", "--strict"], r"burst\.csv:2: zero output tokens"),
        (["info", "{burst}", "--block-tokens", "16"], "does not take block_tokens"),
        (["head", "conversation", "--format", "mooncake"], "takes neither a format"),
        (["convert", "{burst}", "{folder}/out.jsonl", "--max-context", "5"], "smallest window"),
        (["convert", "{burst}", "{folder}/absent/out.jsonl"], "No such file"),
        (["slice", "{burst}", "{folder}/out.jsonl", "--start", "1000"], "no request arrives"),
        (["slice", "{burst}", "{folder}/out.jsonl", "--time-scale", "0"], "time scale"),
        (["synth", "{burst}", "{folder}/out.jsonl"], "is not JSON"),
        (["synth", "openhands", "{folder}/out.jsonl"], "is no draw"),
        (["synth", "conversation", "{folder}/out.jsonl", "--rate", "0"], "rate 0"),
        (["fit", "absent", "{folder}/law.json"], "no such file"),
        (["fetch", "nothing"], "no public trace 'nothing'"),
        (["fetch", "weka-agentic"], "cannot be fetched as one file"),
        (["topk", "{burst}"], "is no file of top-k selections"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    burst: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    filled = [one.format(burst=burst, folder=tmp_path) for one in arguments]
    said = run(*filled, code=2)
    assert re.search(message, said)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["burst.csv"]


def test_the_module_runs_by_itself_and_imports_nothing_heavy_for_its_help() -> None:
    script = (
        "import sys; import hisparsim_traces.cli;"
        "assert not {'pyarrow', 'matplotlib', 'pydantic', 'pandas', 'torch', 'hisparsim'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "hisparsim_traces", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("info", "head", "slice", "convert", "synth", "fit", "fetch", "catalogue"):
        assert command in done.stdout
