import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hisparsim.cli.app import COMMANDS, INTERRUPTED, USER_ERROR, load_command, run
from hisparsim.results import ResultError
from hisparsim.serving.policies import POLICIES, policy_class


def test_help_lists_every_command_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert name in shown


def processor_s(*arguments: str) -> float:
    """Processor time of a command, which other work on the machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "hisparsim.cli", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_answers_in_half_a_second() -> None:
    assert min(processor_s("--help") for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    "statement", ["import hisparsim", "import hisparsim.cli.app", "import hisparsim.cli.replay"]
)
def test_importing_loads_no_heavy_library(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not {"torch", "matplotlib", "pandas", "pyarrow"} & set(done.stdout.split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_of_the_table_can_be_loaded_and_shows_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_command(name)
    assert run([name, "--help"]) == 0
    assert "Usage: hisparsim " + name in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replai"], "No such command 'replai'"),
        (["replay"], "Missing argument 'TRACE'"),
        (["replay", "openhands", "--jobs", "0"], "--jobs"),
        (["replay", "openhands", "--wrong"], "No such option"),
        (["report", "nowhere"], "nowhere: holds no run directory"),
        (["compare", "nowhere"], "nowhere: holds no run directory"),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def failing(error: BaseException) -> object:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ResultError("two\n  lines"), USER_ERROR, "error: two lines\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.csv"),
            USER_ERROR,
            "error: a.csv: No such file or directory\n",
        ),
        (KeyboardInterrupt(), INTERRUPTED, "hisparsim: interrupted\n"),
    ],
)
def test_project_errors_and_interrupts_end_as_one_line(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hisparsim.cli.policies.policies", failing(error))
    assert run(["policies"]) == code
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparsim.cli.policies.policies", failing(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        run(["policies"])


def test_policies_are_listed_with_every_switch_as_set_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies"]) == 0
    shown = capsys.readouterr().out
    for name in POLICIES:
        assert name in shown
        for option, default in policy_class(name).options.items():
            assert f"policy.{option}={str(default).lower()}" in shown


def test_a_scenario_is_shown_a_value_a_line_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["scenario", "show", "--set", "kv.hot_rows=8192"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kv.hot_rows", "8192", "--set"] in rows
    assert ["model.preset", "glm-5.3", "default"] in rows


def test_a_missing_extra_is_named_with_the_way_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("hisparsim.cli.app.importlib.import_module", missing)
    assert run(["kernels"]) == USER_ERROR
    assert "pip install 'hisparsim[real]'" in capsys.readouterr().err
