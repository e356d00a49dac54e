"""`hisparsim scenario ...`: a scenario with every value in force, its schema, one made of a launch line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hisparsim.specs.scenario import Scenario

app = typer.Typer(
    help="Show a scenario as resolved, the schema of its file, or make one of a launch line.",
    no_args_is_help=True,
)


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="Scenario file; all defaults if left out.")] = None,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="The same as the argument, as `replay` takes it.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print every value of a scenario with where it came from: default, preset, file, --set or derived."""
    from hisparsim.specs.errors import ScenarioError
    from hisparsim.specs.scenario import Scenario

    if file is not None and scenario is not None:
        raise ScenarioError("give the scenario file once, as argument or with --scenario")
    values = Scenario.load(file or scenario, overrides or ()).resolved()
    if as_json:
        rows = [
            {
                "key": value.key,
                "value": _plain(value.value),
                "origin": value.origin.value,
                "source": value.source,
            }
            for value in values
        ]
        typer.echo(json.dumps({"values": rows}, indent=2))
        return
    shown = [(value.key, _text(value.value), value.origin.value, value.source) for value in values]
    typer.echo(_aligned([("key", "value", "from", "source"), *shown]))


@app.command()
def schema() -> None:
    """Print the JSON schema of a scenario file."""
    from hisparsim.specs.scenario import Scenario

    typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))


@app.command("from-command")
def from_command(
    command: Annotated[str, typer.Argument(help="A launch line in quotes, or @FILE that holds one.")],
    node: Annotated[str, typer.Option(help="The node that it runs on.")] = "h200x8",
    out: Annotated[Path | None, typer.Option(help="Scenario file to write; default: stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Turn `vllm serve ...` or `python -m sglang.launch_server ...` into a scenario.

    Every flag that is not modelled is named, in the file and on stderr.
    """
    from hisparsim.launch import translate_command

    text = _launch_line(Path(command[1:])) if command.startswith("@") else command
    made = translate_command(text, node=node)
    obstacle = _obstacle(made.scenario())
    if as_json:
        document = {
            "engine": made.engine,
            "settings": dict(made.settings),
            "origins": dict(made.origins),
            "unmodelled": list(made.unmodelled),
            "notes": list(made.notes),
        }
        typer.echo(json.dumps(document, indent=2))
    elif out is None:
        typer.echo(made.toml(), nl=False)
    if out is not None:
        out.write_text(made.toml(), encoding="utf-8")
        typer.echo(f"scenario: {out}", err=True)
    for sentence in made.unmodelled:
        typer.echo(f"not modelled: {sentence}", err=True)
    if obstacle is not None:
        typer.echo(f"it could not start: {obstacle}", err=True)


@app.command("profile-from-counters")
def profile_from_counters(
    metrics: Annotated[Path, typer.Argument(help="What vLLM's /metrics answered, as text.")],
    context: Annotated[int, typer.Option(help="Typical context of the requests behind it, tokens.", min=1)],
    hot_rows: Annotated[int, typer.Option(help="Rows of a request's hot buffer.", min=1)],
    out: Annotated[Path, typer.Option(help="Profile file to write, for locality.profile.")],
    before: Annotated[Path | None, typer.Option(help="An earlier answer: its counts are taken off.")] = None,
    base: Annotated[str, typer.Option(help="Profile whose shape is kept.")] = "glm-5.1",
) -> None:
    """Turn vLLM's counters of hot-buffer hits and misses into a locality profile."""
    from hisparsim.locality.counters import read_counters, write_profile

    counted = read_counters(metrics)
    if before is not None:
        counted = counted.since(read_counters(before))
    profile = write_profile(counted, out, base=base, context_tokens=context, hot_rows=hot_rows)
    typer.echo(
        f"{counted.hits} hits, {counted.misses} misses: {profile.scale:.3g} x the misses of {base}; "
        f"use --set locality.profile={out}"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Query: rows of text, columns aligned left; the last one is as long as it is, on one line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)
    return "\n".join(lines)


def _obstacle(scenario: Scenario) -> str | None:
    """Query: why such a server could not start (its weights do not fit), None where it could."""
    from hisparsim.serving.policies import policy_class
    from hisparsim.specs.errors import ScenarioError
    from hisparsim.specs.setup import PoolKind

    kind = policy_class(scenario.policy.name)
    try:
        scenario.setup(PoolKind.PACKED if kind.uses_groups else PoolKind.WHOLE)
    except ScenarioError as error:
        return str(error)
    return None


def _launch_line(file: Path) -> str:
    """Query: the text of a file that holds a launch line."""
    from hisparsim.launch import LaunchError

    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LaunchError(f"@{file} is not text: {error}") from None


def _plain(value: Any) -> Any:
    """Query: the value as JSON can hold it: infinity becomes the text `inf`."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
