"""``hisparsim replay``: a trace under several residency policies, side by side."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .parallel import Report, run_each
from .printing import format_rows, print_json, say, transpose
from .report import REPORT_DIRECTORY

if TYPE_CHECKING:
    from hisparsim.results import RunResult
    from hisparsim.specs.scenario import Scenario
    from hisparsim_traces import Trace

DEFAULT_POLICIES = ("gpu-only", "prefix-offload", "host-resident", "hybrid")
UNREADABLE = ("not JSON", "not a JSON", "unreadable ", "negative ", "no ")
"""How the reasons begin for which a reader drops a damaged row (not: empty requests, a limit)."""


@dataclass(frozen=True)
class Job:
    """One run to make: everything a worker process needs."""

    scenario: Scenario
    trace: Trace
    check: bool


class ReplayError(ValueError):
    """The command line asks for runs that cannot be made."""


def replay(
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A trace file, or the name of a bundled trace: openhands, ..."),
    ],
    scenario: Annotated[Path | None, typer.Option(help="Scenario file (TOML).")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy's name, or path/to/file.py:Class; repeats. Default: the four main ones."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first requests of the trace only.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything drawn at random.", min=0)] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; default: one a core.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="New directory for records and report.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the laws at every step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    format_name: Annotated[
        str | None, typer.Option("--format", help="Format of the trace file; default: found by its content.")
    ] = None,
) -> None:
    """Replay a trace under residency policies: TTFT, TPOT, throughput, occupancy and PCIe traffic."""
    from hisparsim.results.directory import refuse_existing
    from hisparsim.results.metrics import run_row

    if out is not None:
        refuse_existing(out)
    scenarios = _scenarios(scenario, policy, overrides or [], limit, seed)
    loaded = load_whole(trace, scenarios[0].workload.limit, format_name)
    made = [Job(each, loaded, check) for each in scenarios]
    names = [each.policy.name for each in scenarios]
    with _progress(names, loaded.num_requests) as (on_progress, on_done):
        results = run_each(run_job, made, jobs or os.cpu_count() or 1, on_progress, on_done)
    if as_json:
        print_json({"trace": dict(results[0].trace), "runs": [run_row(result) for result in results]})
    else:
        _print_results(results)
    if out is not None:
        page = write_results(results, out)
        say(f"report: {page}")


def load_whole(source: str, limit: int | None, format_name: str | None) -> Trace:
    """Query: the trace, if all its rows can be read; rows that mean no request are left out and counted.

    Raises:
        TraceError: the file is no trace, or has a row that cannot be read; it names the first one.
        ReplayError: as the second, where rows that had to be changed stand before it.
    """
    from hisparsim_traces import TraceError, load

    loaded = load(source, limit=limit, format=format_name)
    dropped = loaded.loading.rows_dropped
    unreadable = {reason: count for reason, count in dropped.items() if reason.startswith(UNREADABLE)}
    if not unreadable:
        return loaded
    try:
        load(source, limit=limit, format=format_name, zero_tokens="keep", strict=True)
    except TraceError as error:
        if any(reason in str(error) for reason in unreadable):
            raise
    counted = ", ".join(f"{count} x {reason}" for reason, count in unreadable.items())
    raise ReplayError(
        f"{source}: rows cannot be read ({counted}); `hisparsim trace convert` writes a file without them"
    )


def run_job(job: Job, report: Report) -> RunResult:
    """Query: the run, with the origin of every scenario value; reports how many requests have finished."""
    import hisparsim
    from hisparsim.serving.policies.faults import policy_faults

    with policy_faults(job.scenario.policy.name):
        result = hisparsim.simulate(job.scenario, job.trace, check=job.check, progress=report)
    resolved = [
        {"key": value.key, "value": value.value, "origin": value.origin.value, "source": value.source}
        for value in job.scenario.resolved()
    ]
    return replace(result, scenario={**result.scenario, "resolved": resolved})


def write_results(results: Sequence[RunResult], out: Path) -> Path:
    """Change: write ``out/<policy>/`` for each run and ``out/report/``; returns the report's page.

    Raises:
        RunDirectoryError: ``out`` exists already.
    """
    from hisparsim.results.directory import LISTING_FILE, published, to_json, write_run
    from hisparsim_reports.page import write_report

    names = directory_names([result.policy for result in results])
    with published(out) as directory:
        for name, result in zip(names, results, strict=True):
            write_run(result, directory / name)
        (directory / LISTING_FILE).write_text(to_json(names) + "\n", encoding="utf-8")
        (directory / REPORT_DIRECTORY).mkdir()
        page = write_report(results, directory / REPORT_DIRECTORY)
    return out / page.relative_to(directory)


def directory_names(policies: Sequence[str]) -> list[str]:
    """Query: a directory name for each policy: its name, or the class of ``path/to/file.py:Class``."""
    names: list[str] = []
    for policy in policies:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", policy.rsplit(":", 1)[-1]).strip("-.") or "policy"
        taken, i = name, 2
        while taken in names or taken == REPORT_DIRECTORY:
            taken, i = f"{name}-{i}", i + 1
        names.append(taken)
    return names


def _scenarios(
    file: Path | None,
    policies: Sequence[str] | None,
    overrides: Sequence[str],
    limit: int | None,
    seed: int | None,
) -> list[Scenario]:
    """Query: one scenario a policy, in the order asked for; the four main policies where none is named."""
    from hisparsim.serving.policies import policy_class
    from hisparsim.specs.scenario import Origin, Scenario

    flags = [f"workload.limit={limit}"] if limit is not None else []
    flags += [f"seed={seed}"] if seed is not None else []
    base = Scenario.load(file, [*overrides, *flags])
    names = list(policies or ())
    if not names:
        named = base.origin("policy.name") is not Origin.DEFAULT
        names = [base.policy.name] if named else list(DEFAULT_POLICIES)
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ReplayError(f"--policy {twice[0]}: given twice; name each policy once")
    for name in names:
        policy_class(name)
    return [base.with_overrides([f"policy.name={name}"]) for name in names]


def _print_results(results: Sequence[RunResult]) -> None:
    from hisparsim.results.metrics import compute_metrics
    from hisparsim_reports.narrative import paragraph
    from hisparsim_reports.tables import policy_table

    metrics = [compute_metrics(result) for result in results]
    table = policy_table(results, metrics)
    headers, rows = transpose(table.headers, table.rows)
    typer.echo(format_rows(headers, rows))
    typer.echo()
    typer.echo(paragraph(results, metrics))


@contextmanager
def _progress(names: Sequence[str], num_requests: int) -> Iterator[tuple[Any, Any]]:
    """Change: show on stderr how far each policy is; yields what hears of progress and of finished runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        tasks = [shown.add_task(name, total=num_requests) for name in names]

        def on_progress(i: int, num_finished: int) -> None:
            shown.update(tasks[i], completed=num_finished)

        def on_done(i: int, result: RunResult) -> None:
            shown.update(tasks[i], completed=num_requests)
            if not console.is_terminal:
                say(f"{names[i]}: simulated in {result.wall_s:.1f} s")

        yield on_progress, on_done
