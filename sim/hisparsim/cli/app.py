"""The command line: one table of commands, each imported when it is called.

``hisparsim --help`` imports none of them, so it answers at once. Errors that a user can mend end here: one
line on stderr, exit code 2. Results go to stdout, talk and progress to stderr.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = MappingProxyType(
    {
        "replay": ("hisparsim.cli.replay:replay", "Replay a trace under residency policies and report."),
        "capacity": ("hisparsim.cli.capacity:capacity", "How many requests fit, by context length."),
        "explain": ("hisparsim.cli.explain:explain", "The terms of one step's time, with their sources."),
        "policies": ("hisparsim.cli.policies:policies", "The residency policies, one line each."),
        "scenario": ("hisparsim.cli.scenario:app", "A scenario as resolved, or the schema of its file."),
        "report": ("hisparsim.cli.report:report", "Draw the report of finished runs again."),
        "compare": ("hisparsim.cli.compare:compare", "Two runs, or a run and a measured server."),
        "trace": ("hisparsim_traces.cli:app", "Describe, convert and synthesise traces."),
        "conform": ("hisparsim.cli.conform:conform", "Step-by-step agreement with a real scheduler's log."),
        "published": ("hisparsim.cli.published:published", "Published serving results, simulated again."),
        "sweep": ("hisparsim.cli.sweep:sweep", "Many scenarios: policies, sizes, limits, rates; resumable."),
        "goodput": ("hisparsim.cli.goodput:goodput", "The highest load each policy sustains under an SLO."),
        "recommend": ("hisparsim.cli.recommend:recommend", "A configuration for a trace, with engine flags."),
        "realrun": ("hisparsim_realrun.cli:realrun", "Play a trace on real memory under one policy."),
        "replay-log": ("hisparsim_realrun.cli:replay_log", "Make a real run's decisions again and compare."),
        "calibrate": ("hisparsim.cli.calibrate:calibrate", "Measure this machine's step times and links."),
        "validate": ("hisparsim.cli.validate:validate", "Simulated against measured on this machine."),
        "doctor": ("hisparsim.cli.doctor:doctor", "Is this machine fit for real runs?"),
        "kernels": ("hisparsim_kernels.cli:app", "Compile and measure the Triton kernels."),
    }
)
"""Name -> (``module:attribute``, one line of help). The attribute is a typer app or a command function."""

USER_ERROR = 2
INTERRUPTED = 130
_PACKAGES = ("hisparsim", "hisparsim_traces", "hisparsim_kernels", "hisparsim_realrun", "hisparsim_reports")
# Newer typer releases bundle their own click: its classes are reached through the one that typer exports.
_UsageError: Any = typer.BadParameter.__base__


class MissingExtraError(ValueError):
    """A command needs a package that this installation lacks."""


class _LazyGroup(TyperGroup):
    """Knows names and help lines; imports a command only when it is the one that was called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """Query: the names, in the order of the table."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Change: put the real command in place of its stand-in, then resolve as usual."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Query: the command behind a name, imported.

    Raises:
        MissingExtraError: a package of an extra is not installed.
    """
    target, line = COMMANDS[name]
    module_name, attribute = target.split(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _PACKAGES:
            raise
        raise MissingExtraError(
            f"`hisparsim {name}` needs the package {error.name!r}: pip install 'hisparsim[real]'"
        ) from None
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name, group.help = name, group.help or line
        return group
    single = typer.Typer(add_completion=False)
    single.command(name)(found)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    help="Simulate KV residency policies for sparse-MLA serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from hisparsim import is_compiled

        typer.echo(version("hisparsim") + " (compiled)" * is_compiled())
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Simulate KV residency policies for sparse-MLA serving."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Change: run one command line (of this process where None is given); returns its exit code."""
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="hisparsim", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except _UsageError as error:
        return _fail(error.format_message())
    except OSError as error:
        return _fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    except (ValueError, RuntimeError, AssertionError) as error:
        if type(error).__module__.split(".")[0] not in _PACKAGES:
            raise
        return _fail(str(error))
    if code == INTERRUPTED:
        sys.stderr.write("hisparsim: interrupted\n")
    return code if isinstance(code, int) else 0


def main() -> None:
    """Change: the console script; leaves the process."""
    code = run()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not break into the way out
    sys.exit(code)


def _fail(message: str) -> int:
    """Change: the message on one line of stderr; nothing where help was printed in its place."""
    if message:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return USER_ERROR
