"""`hisparsim conform`: hold the serving core to what a real scheduler decided, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .printing import format_rows, print_json, say

if TYPE_CHECKING:
    from hisparsim.conform.compare import Conformance, Difference


def conform(
    folder: Annotated[Path, typer.Argument(help="Folder of decision logs: NAME.json with NAME.csv.gz.")],
    workload: Annotated[str | None, typer.Option(help="Only the log with this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run the conservation laws after each step.")
    ] = False,
) -> None:
    """Replay logged workloads in lockstep and compare each column of each step (exit code 1: unequal)."""
    from hisparsim.conform.compare import run_conformance
    from hisparsim.conform.workload import find_logs, read_log
    from hisparsim.serving.blocks import LawBroken

    verdicts: list[Conformance] = []
    try:
        for path in find_logs(folder, workload):
            say(f"{path.stem} ...")
            verdicts.append(run_conformance(read_log(path), check=check))
    except LawBroken as error:
        say(f"law broken: {error}")
        raise typer.Exit(1) from None
    if as_json:
        print_json({"workloads": [_as_dict(verdict) for verdict in verdicts]})
    else:
        _print_table(verdicts)
    if not all(verdict.conforms for verdict in verdicts):
        raise typer.Exit(1)


def _as_dict(verdict: Conformance) -> dict[str, Any]:
    found = verdict.first_difference
    return {
        "name": verdict.name,
        "policy": verdict.policy,
        "num_steps": verdict.num_steps,
        "num_equal_steps": verdict.num_equal_steps,
        "first_difference": None
        if found is None
        else {
            "step": found.step,
            "column": found.column,
            "expected": found.expected,
            "actual": found.actual,
        },
        "totals": {
            name: {"expected": logged, "actual": own} for name, (logged, own) in verdict.totals.items()
        },
    }


def _print_table(verdicts: list[Conformance]) -> None:
    headers = ("workload", "policy", "steps", "equal", "first difference", "steps/s")
    rows = []
    for verdict in verdicts:
        found = verdict.first_difference
        where = "-" if found is None else f"step {found.step}, {found.column}"
        rate = verdict.num_steps / verdict.wall_s if verdict.wall_s else 0.0
        rows.append(
            (
                verdict.name,
                verdict.policy,
                f"{verdict.num_steps:,}" + ("" if verdict.is_complete else " (cut)"),
                f"{verdict.num_equal_steps:,}",
                where,
                f"{rate:,.0f}",
            )
        )
    typer.echo(format_rows(headers, rows))
    equal = sum(verdict.conforms for verdict in verdicts)
    typer.echo(f"\n{equal} of {len(verdicts)} workloads equal in every step and column")
    for verdict in verdicts:
        if verdict.unknown_columns:
            typer.echo(f"{verdict.name}: not compared: {', '.join(verdict.unknown_columns)}")
        if verdict.first_difference is not None:
            _print_difference(verdict, verdict.first_difference)
    if len(verdicts) == 1 and verdicts[0].conforms:
        _print_totals(verdicts[0])


def _print_difference(verdict: Conformance, found: Difference) -> None:
    typer.echo(f"\n{verdict.name}: first difference in step {found.step}")
    columns = list(found.expected_row or found.actual_row)
    unequal = set(found.unequal_columns)

    def cell(row: dict[str, int], column: str) -> str:
        return f"{row[column]:,}" if column in row else "-"

    rows = [
        (
            column,
            cell(found.expected_row, column),
            cell(found.actual_row, column),
            "<--" if column in unequal else "",
        )
        for column in columns
    ]
    typer.echo(format_rows(("column", "log", "own", ""), rows))
    for title, decisions in (("log", found.logged_decisions), ("own", found.own_decisions)):
        typer.echo(f"\nrecent decisions, {title}:")
        for decision in decisions or ("(none)",):
            typer.echo(f"  {decision}")
    _print_totals(verdict)


def _print_totals(verdict: Conformance) -> None:
    def number(value: float) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"

    rows = [(name, number(logged), number(own)) for name, (logged, own) in verdict.totals.items()]
    typer.echo(f"\n{verdict.name}: totals")
    typer.echo(format_rows(("total", "log", "own"), rows))
