"""`hisparsim scenario show|schema`: a scenario with every value in force, and the form of its file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Show a scenario as resolved, or the schema of its file.", no_args_is_help=True)


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
        typer.echo("error: give the scenario file once, as argument or with --scenario", err=True)
        raise typer.Exit(2)
    try:
        values = Scenario.load(file or scenario, overrides or ()).resolved()
    except ScenarioError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
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
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("key", no_wrap=True)
    for heading in ("value", "from", "source"):
        table.add_column(heading, overflow="fold")
    for value in values:
        table.add_row(value.key, _text(value.value), value.origin.value, value.source)
    Console().print(table)


@app.command()
def schema() -> None:
    """Print the JSON schema of a scenario file."""
    from hisparsim.specs.scenario import Scenario

    typer.echo(json.dumps(Scenario.model_json_schema(), indent=2))


def _plain(value: Any) -> Any:
    """Query: the value as JSON can hold it: infinity becomes the text `inf`."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
