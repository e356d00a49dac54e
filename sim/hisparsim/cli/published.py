"""`hisparsim published`: published serving results beside what the simulator says of the same runs."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hisparsim.published.points import PointResult

PIPED_COLUMNS = 160
"""Width of the table where no terminal says how wide it is: no name is broken."""


def published(
    name: Annotated[str | None, typer.Option("--set", help="One set of points only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate published serving runs and print the errors."""
    from rich.console import Console

    from hisparsim.published.points import published_points, simulate_point

    console = Console(stderr=True)
    results = []
    for point in published_points(name):
        console.print(f"simulating {point.set_name}: {point.label}", style="dim")
        results.append(simulate_point(point))
    if as_json:
        rows = [
            {
                "set": result.point.set_name,
                "run": result.point.label,
                "published": result.point.figures,
                "simulated": result.simulated,
                "rel_error": result.errors(),
            }
            for result in results
        ]
        typer.echo(json.dumps({"points": rows}, indent=2))
    else:
        _print_table(results)


def _print_table(results: list[PointResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("set", "run", "metric", box=None, pad_edge=False)
    for heading in ("published", "simulated", "error"):
        table.add_column(heading, justify="right")
    errors: dict[str, list[float]] = {}
    for result in results:
        for metric, value in result.point.figures.items():
            error = result.errors()[metric]
            errors.setdefault(metric, []).append(abs(error))
            shown = (f"{value:.4g}", f"{result.simulated[metric]:.4g}", f"{error:+.1%}")
            table.add_row(result.point.set_name, result.point.label, metric, *shown)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_COLUMNS)
    console.print(table)
    for metric, values in errors.items():
        console.print(
            f"{metric}: median error {statistics.median(values):.1%}, largest {max(values):.1%}, "
            f"{len(values)} points"
        )
