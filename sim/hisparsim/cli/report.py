"""``hisparsim report``: draw the page of finished runs again, or one page over several directories."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .printing import say

if TYPE_CHECKING:
    from hisparsim.results import RunResult

REPORT_DIRECTORY = "report"


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or directories that hold some.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="New directory for the page; needed where several DIR are given.")
    ] = None,
) -> None:
    """Draw the report again: DIR/report is replaced, or --out is written. Prints the page's path."""
    from hisparsim.results.directory import find_runs, published, read_run
    from hisparsim_reports.errors import ReportError
    from hisparsim_reports.page import PAGE_NAME, write_report

    if out is None and len(directories) > 1:
        raise ReportError(f"{len(directories)} directories are given; name a new directory with --out")
    found = [path for directory in directories for path in find_runs(directory)]
    runs = labelled([read_run(path) for path in found], found)
    if out is None:
        target = directories[0] / REPORT_DIRECTORY
        if target.exists() and not (target / PAGE_NAME).is_file():
            raise ReportError(f"{target}: exists and is not a report; name a new directory with --out")
        old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        if target.exists():
            target.rename(old)
    else:
        target, old = out, None
    try:
        with published(target) as directory:
            write_report(runs, directory)
    except BaseException:
        if old is not None and old.exists():
            old.rename(target)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    say(f"{len(runs)} runs drawn")
    typer.echo(target / PAGE_NAME)


def labelled(runs: Sequence[RunResult], paths: Sequence[Path]) -> list[RunResult]:
    """Query: the runs under names that tell them apart: the policy, or its directory and the policy."""
    times = Counter(run.policy for run in runs)
    return [
        run if times[run.policy] == 1 else replace(run, policy=f"{path.parent.name}/{path.name}")
        for run, path in zip(runs, paths, strict=True)
    ]
