"""``hisparsim sweep``: many scenarios over the same traces, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .printing import format_rows, print_json, say

if TYPE_CHECKING:
    from hisparsim.sweep.definition import Definition
    from hisparsim.sweep.plan import Plan
    from hisparsim.sweep.runner import Execution
    from hisparsim.sweep.search import SearchKind
    from hisparsim.sweep.store import SweepStore
    from hisparsim.sweep.table import SweepTable

INTERRUPTED = 130
SHOWN_METRICS = (
    "ttft_s.p50",
    "ttft_s.p99",
    "tpot_s.p50",
    "output_tokens_per_s",
    "num_preemptions",
    "bound_by",
)
MAX_SHOWN_ROWS = 40


def sweep(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Sweep file (TOML).")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for runs, table and report.")] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(help="key=v1,v2 or key=start:stop:num[:log]; repeats, and replaces the file's."),
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="A trace file or a bundled trace's name; repeats.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first requests of each trace only.", min=1)] = None,
    seed: Annotated[list[int] | None, typer.Option(help="A seed; repeats.", min=0)] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.", min=1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    search: Annotated[str, typer.Option(help="grid, halving (on trace prefixes) or optuna.")] = "grid",
    trials: Annotated[int, typer.Option(help="Combinations that --search optuna tries.", min=1)] = 64,
    executor: Annotated[str, typer.Option(help="processes or ray.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the runs and estimate the time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run every combination of the axes over the traces; --resume continues after any end of the process."""
    from hisparsim.sweep.plan import plan_sweep
    from hisparsim.sweep.search import SearchKind, describe
    from hisparsim.sweep.store import SweepStore

    kind = choice("--search", search, SearchKind)
    execution = execution_of(executor, jobs, address)
    if resume and out is None:
        from hisparsim.sweep.errors import SweepError

        raise SweepError("--resume continues the sweep of a directory: give it with --out")
    plan = plan_sweep(_definition(file, axis, trace, limit, seed, overrides))
    if dry_run:
        _print_estimate(plan, execution.jobs, as_json)
        return
    _require_possible(plan)
    description, sha256 = plan.description(describe(kind, trials, plan.base.seed))
    page: Path | None = None
    with ExitStack() as stack:
        store: SweepStore | None = None
        if out is not None:
            store = SweepStore(out, description, sha256=sha256, resume=resume)
            stack.callback(store.close)
        table = _run(plan, execution, kind, trials, store)
        if store is not None:
            store.write_table(table.columns, table.rows)
            page = store.write_report(lambda place: _write_report(table, plan, place))
    _require_some(table)
    if page is not None:
        say(f"report: {page}")
    if as_json:
        from hisparsim.sweep.table import json_rows

        print_json(json_rows(table))
    else:
        print_table(table)


def choice(flag: str, given: str, kinds: Any) -> Any:
    """Query: the member of an enumeration by its value. Raises SweepError with the known ones."""
    from hisparsim.sweep.errors import SweepError

    known = [kind.value for kind in kinds]
    if given not in known:
        raise SweepError(f"{flag} {given}: known are {', '.join(known)}")
    return kinds(given)


def execution_of(executor: str, jobs: int | None, address: str | None) -> Execution:
    """Query: how to run, from the flags. Raises SweepError for an unknown executor."""
    from hisparsim.sweep.runner import Execution, ExecutorKind

    return Execution(choice("--executor", executor, ExecutorKind), jobs or os.cpu_count() or 1, address)


def _definition(
    file: Path | None,
    axes: Sequence[str] | None,
    traces: Sequence[str] | None,
    limit: int | None,
    seeds: Sequence[int] | None,
    sets: Sequence[str] | None,
) -> Definition:
    from hisparsim.sweep.axes import parse_axis_text
    from hisparsim.sweep.definition import Definition, read_definition

    base = Definition() if file is None else read_definition(file)
    return base.with_options(
        traces=traces or (),
        limit=limit,
        seeds=seeds or (),
        sets=sets or (),
        axes=[parse_axis_text(text) for text in axes or ()],
    )


def _run(
    plan: Plan, execution: Execution, kind: SearchKind, trials: int, store: SweepStore | None
) -> SweepTable:
    from hisparsim.sweep.optuna_search import optuna_search
    from hisparsim.sweep.runner import running
    from hisparsim.sweep.search import Candidates, SearchKind, searched_rows, successive_halving
    from hisparsim.sweep.table import sweep_table

    tasks = plan.tasks()
    total = len(tasks) if kind is SearchKind.GRID else None
    with (
        progress("runs", total) as advance,
        running(plan.shelf, execution, store, lambda *_: advance(1)) as runner,
    ):
        done = sum(task.fingerprint in runner.records for task in tasks)
        if done and kind is SearchKind.GRID:
            say(f"{done} of {len(tasks)} runs are there already")
            advance(done)
        try:
            if kind is SearchKind.GRID:
                runner.run(tasks)
                return sweep_table(plan, plan.planned, runner.records)
            candidates = Candidates(plan, runner)
            if kind is SearchKind.HALVING:
                verdicts = successive_halving(candidates)
            else:
                verdicts = optuna_search(candidates, trials, plan.base.seed)
            planned, told = searched_rows(candidates, verdicts)
            return sweep_table(plan, planned, runner.records, extra=told)
        except KeyboardInterrupt:
            where = (
                f" are kept in {store.path}; --resume continues" if store else ", none is kept without --out"
            )
            say(f"stopped: {len(runner.records)} finished runs{where}")
            raise


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Change: show on stderr how many runs are done; yields what adds to that number."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (BarColumn(30), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn(), Remaining())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task(what, total=total)
        yield lambda num: shown.update(bar, advance=num)


def _require_possible(plan: Plan) -> None:
    """Query: raise SweepError where no scenario of the plan can be run, before anything is written."""
    from hisparsim.sweep.errors import SweepError

    errors = [planned.error for planned in plan.planned if planned.task is None]
    if errors and len(errors) == len(plan.planned):
        raise SweepError(f"none of the {len(errors)} scenarios can be run; the first: {errors[0]}")


def _require_some(table: SweepTable) -> None:
    from hisparsim.sweep.errors import SweepError

    errors = [str(row["error"]) for row in table.rows if row["error"] is not None]
    if errors and len(errors) == len(table.rows):
        raise SweepError(f"none of the {len(errors)} scenarios could be run; the first: {errors[0]}")


def _print_estimate(plan: Plan, jobs: int, as_json: bool) -> None:
    from dataclasses import asdict

    from hisparsim.sweep.estimate import estimate

    told = estimate(plan, jobs)
    if as_json:
        print_json({**asdict(told), "jobs": jobs})
        return
    typer.echo(
        f"{told.num_scenarios} scenarios, {told.num_runs} distinct runs; about {told.seconds:.0f} s with "
        f"{jobs} workers"
    )
    if told.num_impossible:
        typer.echo(f"{told.num_impossible} cannot be run; the first: {told.first_error}")


def print_table(table: SweepTable) -> None:
    """Change: print the rows, the first of a long table, with the metrics that people ask for first."""
    shared = {name for name in ("policy", "search") if name in table.columns}
    names = [name for name in table.columns if name in table.axes or name in shared]
    ran = [row for row in table.rows if row["error"] is None]
    rows = [[_cell(row[name]) for name in (*names, *SHOWN_METRICS)] for row in ran[:MAX_SHOWN_ROWS]]
    typer.echo(format_rows([*names, *SHOWN_METRICS], rows))
    if len(ran) > MAX_SHOWN_ROWS:
        typer.echo(f"... and {len(ran) - MAX_SHOWN_ROWS} more rows")
    failed = [row for row in table.rows if row["error"] is not None]
    for row in failed[:MAX_SHOWN_ROWS]:
        told = ", ".join(f"{name} {_cell(row[name])}" for name in names)
        typer.echo(f"failed: {told}: {row['error']}")


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_report(table: SweepTable, plan: Plan, directory: Path) -> Path:
    from hisparsim_reports.sweep_page import SweepData, write_sweep_report

    definition = plan.definition
    return write_sweep_report(
        SweepData(
            title=", ".join(trace.name for trace in plan.traces.values()),
            axes=table.axes,
            rows=table.rows,
            objectives=tuple((o.metric, o.maximize) for o in definition.objectives),
            constraints=tuple(str(constraint) for constraint in definition.constraints),
        ),
        directory,
    )
