"""The page about traces names every format, command and policy there is, and what it shows comes out so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hisparsim_traces import load
from hisparsim_traces.bundled import BUNDLED
from hisparsim_traces.cli import app
from hisparsim_traces.cli_options import LoopChoice, OverLongChoice, WrapsChoice
from hisparsim_traces.formats import FORMATS
from hisparsim_traces.topk import TopkReader, TopkWriter

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


@pytest.fixture(scope="module")
def page() -> str:
    if not PAGE.exists():
        pytest.skip("the page is not here: an installed package")
    return PAGE.read_text("utf-8")


def test_every_format_policy_and_bundled_trace_is_on_the_page(page: str) -> None:
    for choice in (LoopChoice, OverLongChoice, WrapsChoice):
        for value in choice:
            assert f"`{value.value}`" in page, value
    for name in (*FORMATS, *BUNDLED):
        assert f"`{name}`" in page, name


def test_every_command_is_on_the_page_and_every_option_there_exists(page: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {option for command in commands.values() for one in command.params for option in one.opts}
    for name in commands:
        assert re.search(rf"`{name}[ `]", page), name
    for option in set(re.findall(r"--[a-z][a-z0-9-]+", page)):
        assert option in known, option


def test_the_figures_it_shows_come_out(page: str) -> None:
    shown = CliRunner().invoke(app, ["info", "conversation"]).stdout
    block = page.split("$ hisparsim trace info conversation\n", 1)[1].split("    ...", 1)[0]
    for line in block.strip().splitlines():
        assert line.strip() in shown
    for image in re.findall(r"\(img/([^)]+)\)", page):
        assert (PAGE.parent / "img" / image).exists()


def test_the_examples_run(page: str, tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_text("ts,isl,osl\n1000,10,2\n2500,20,3\n")
    arguments = ["info", str(table), "--json"]
    for field in ("arrival=ts:ms", "input_tokens=isl", "output_tokens=osl"):
        assert f"--map {field}" in page
        arguments += ["--map", field]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["span_s"] == 1.5
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["synth", "conversation", str(out), "--rate", "1.1", "--seed", "7"])
    assert result.exit_code == 0
    assert load(out).num_requests == 1500
    with TopkWriter(tmp_path / "run.topk", top_k=2048, num_groups=21, about={"model": "glm-5.3"}) as writer:
        writer.append(0, 20, 5, 4096, range(2048))
    assert len(next(iter(TopkReader(tmp_path / "run.topk")))) == 1
