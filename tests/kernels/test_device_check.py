"""The script for a GPU, rehearsed in the interpreter; failures and budgets are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hisparsim_kernels import cli, device_check
from hisparsim_kernels.device_check import Outcome


@pytest.mark.parametrize(("name", "check"), device_check.VALUE_CHECKS, ids=lambda value: str(value)[:20])
def test_each_value_check_passes_in_the_interpreter(name: str, check: device_check.Check) -> None:
    outcome = check(torch.device("cpu"))
    assert outcome.passed, f"{name}: {outcome.detail}"


def test_a_failing_check_fails_the_command_and_the_next_one_still_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def crash(device: torch.device) -> Outcome:
        raise RuntimeError("lost")

    checks = (("crash", crash), ("good", lambda device: Outcome(True, "fine", {"x": 1.0})))
    monkeypatch.setattr(device_check, "VALUE_CHECKS", checks)
    out = tmp_path / "results.json"
    done = CliRunner().invoke(cli.app, ["check", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 1
    results = json.loads(out.read_text())
    assert [(r["name"], r["passed"]) for r in results] == [("crash", False), ("good", True)]
    assert results[0]["detail"] == "RuntimeError: lost" and results[1]["figures"] == {"x": 1.0}


def test_checks_past_the_budget_are_left_out_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "VALUE_CHECKS", (("never", lambda device: Outcome(True, "ran")),))
    (result,) = device_check.run_checks("cpu", budget_s=-1.0)
    assert result.passed is None and "budget" in result.detail
