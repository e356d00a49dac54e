"""``hisparsim compare``: two runs side by side, or a run and a measured server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .printing import format_rows, print_json


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN]", help="Run directories of `replay --out`."),
    ],
    measured: Annotated[
        Path | None,
        typer.Option(help="Result of vllm bench serve, SGLang, AIPerf or GuideLLM, or InferenceX-style CSV."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Row of a CSV of several points; default: the run's own.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two runs, or one run with a measurement, metric by metric."""
    from hisparsim.results.directory import find_runs, read_run
    from hisparsim.results.metrics import scenario_value
    from hisparsim_reports.comparison import chosen_two, compare_runs, compare_with_measurement
    from hisparsim_reports.errors import ReportError
    from hisparsim_reports.measured import read_measurement

    found = [path for given in runs for path in find_runs(given)]
    if measured is None:
        first, second = chosen_two([read_run(path) for path in found])
        names = (str(found[0]), str(found[1])) if first.policy == second.policy else None
        comparison = compare_runs(first, second, names)
    else:
        if len(found) != 1:
            names_found = ", ".join(str(path) for path in found)
            raise ReportError(f"--measured is compared with one run, {len(found)} were found ({names_found})")
        run = read_run(found[0])
        if concurrency is None:
            concurrency = scenario_value(run.scenario, "workload.concurrency")
        comparison = compare_with_measurement(run, read_measurement(measured, concurrency))
    if as_json:
        print_json(comparison.as_json())
        return
    table = comparison.table()
    typer.echo(format_rows(table.headers, table.rows))
    for note in comparison.notes:
        typer.echo(f"note: {note}")
