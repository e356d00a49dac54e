"""`hisparsim explain`: a table or JSON of one step, and one clear line for what is no step."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from hisparsim.cli.app import run
from hisparsim.cli.explain import explain

app = typer.Typer()
app.command()(explain)
RUN = CliRunner()


def run_json(*arguments: str) -> dict:
    result = RUN.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_json_gives_terms_that_add_up_with_a_source_each():
    printed = run_json("--batch", "8", "--context", "80000")
    assert sum(term["ms"] for term in printed["terms"]) == pytest.approx(printed["total_ms"])
    assert sum(term["share"] for term in printed["terms"]) == pytest.approx(1.0, abs=1e-3)
    assert all(term["source"] for term in printed["terms"])
    assert printed["memory"] == "reported"
    assert printed["load"]["num_decodes"] == 8


def test_the_table_names_the_terms_and_the_total():
    result = RUN.invoke(app, ["--batch", "4", "--prefill", "700", "--past", "70000"])
    assert result.exit_code == 0, result.output
    for word in ("moe", "staging", "launch", "total", "front end"):
        assert word in result.output


def test_resident_pages_and_hot_rows_and_the_profile_move_the_gather():
    def gathered(*arguments: str) -> float:
        terms = {term["term"]: term["ms"] for term in run_json("--batch", "32", *arguments)["terms"]}
        return terms.get("hot_gather", 0.0)

    base = gathered()
    assert gathered("--resident-share", "0.5") < base
    assert gathered("--resident-share", "1") == 0.0
    assert gathered("--set", "kv.hot_rows=8192") < base
    assert gathered("--set", "locality.profile=low-overlap") > base
    assert gathered("--set", "links.gather_gb_per_s=10") > base
    assert gathered("--set", "policy.name=gpu-only") == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "-1"], "negative"),
        (["--batch", "300"], "max_num_seqs"),
        (["--context", "200000"], "max_model_len"),
        (["--prefill", "100", "--past", "150000"], "max_model_len"),
        (["--resident-share", "1.5"], "--resident-share"),
        (["--set", "policy.name=nope"], "hybrid"),
        (["--set", "locality.profile=nope"], "glm-5.1"),
        (["--set", "cost.source=measured"], "roofline"),
        (["--set", "kv.hot_row=1"], "kv.hot_rows"),
    ],
)
def test_what_is_no_step_ends_with_one_line_and_code_2(arguments, words, capsys):
    assert run(["explain", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
