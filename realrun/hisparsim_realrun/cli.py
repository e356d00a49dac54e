"""Commands of the real runner: ``realrun`` plays a trace on real memory, ``replay-log`` decides it again."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import EXIT_DIED, RunDied

if TYPE_CHECKING:
    from .engine import RealRun
    from .options import RunOptions


app = typer.Typer(help="Execute the simulator's plans on real memory.", no_args_is_help=True)


@app.command()
def realrun(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or a bundled trace's name.")],
    scenario: Annotated[Path | None, typer.Option(help="Scenario file (TOML).")] = None,
    policy: Annotated[str | None, typer.Option(help="A policy's name, or path/to/file.py:Class.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first requests of the trace only.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kernels: Annotated[str | None, typer.Option(help="torch or triton; default: the device's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads on a CPU.", min=1)] = None,
    layers: Annotated[int | None, typer.Option(help="The model's first layers only.", min=1)] = None,
    experts: Annotated[int | None, typer.Option(help="Its first experts only.", min=1)] = None,
    selection: Annotated[str, typer.Option(help="profile (of the scenario) or model.")] = "profile",
    record_topk: Annotated[Path | None, typer.Option(help="New top-k trace of what decodes select.")] = None,
    replay_topk: Annotated[
        Path | None, typer.Option(help="Top-k trace whose selections decodes repeat.")
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Bits that do not depend on batch, policy or ranks.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="New run directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Play a trace for real under one residency policy and measure it by the wall clock.

    Under torchrun every rank gets the same command line. Exit code 3: the run died; what had finished is
    printed and written all the same.
    """
    from hisparsim.results.directory import refuse_existing
    from hisparsim.serving.policies.faults import policy_faults
    from hisparsim.specs.scenario import Scenario
    from hisparsim_traces import load

    from .engine import run_real
    from .geometry import sliced_scenario
    from .ranks import Leader, follow

    options = replace(
        _options(device, kernels, threads, selection, batch_invariant),
        record_selections=record_topk,
        replay_selections=replay_topk,
    )
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1 and int(os.environ["RANK"]) > 0:
        _following(lambda: follow(options))
        return
    crew = Leader(options) if num_ranks > 1 else None
    try:
        if out is not None:
            refuse_existing(out)
        settings = list(overrides or [])
        settings += [f"policy.name={policy}"] if policy is not None else []
        settings += [f"workload.limit={limit}"] if limit is not None else []
        with tempfile.TemporaryDirectory(prefix="hisparsim-slice-") as folder:
            chosen = sliced_scenario(Scenario.load(scenario, settings), layers, experts, Path(folder))
            loaded = load(trace, limit=chosen.workload.limit)
            with policy_faults(chosen.policy.name):
                run = run_real(chosen, loaded, options, crew=crew)
            _show(run, out, as_json)
    except RunDied as death:
        if death.run is not None:
            _show(death.run, out, as_json)
        typer.echo(f"hisparsim realrun: the run died: {death}", err=True)
        raise typer.Exit(EXIT_DIED) from None
    finally:
        if crew is not None:
            crew.close()


@app.command("replay-log")
def replay_log(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a real run.")],
) -> None:
    """Drive a fresh serving core with a real run's inputs and compare the decisions, record for record."""
    from .replaying import replay_log as replay

    verdict = replay(run)
    if verdict.difference is not None:
        typer.echo(f"{run}: the logs differ: {verdict.difference}")
        raise typer.Exit(1)
    typer.echo(f"{run}: {verdict.num_decisions} decisions of {verdict.num_plans} plans, all equal")


def _options(
    device: str, kernels: str | None, threads: int | None, selection: str, batch_invariant: bool
) -> RunOptions:
    from .errors import RealRunError
    from .options import RunOptions, SelectionMode

    if selection not in {mode.value for mode in SelectionMode}:
        raise RealRunError(f"--selection {selection!r} is unknown: known are model and profile")
    return RunOptions(
        device=device,
        kernels=kernels,
        threads=threads,
        selection=SelectionMode(selection),
        batch_invariant=batch_invariant,
    )


def _following(life: object) -> None:
    """Change: run a rank's life; one line and exit code 3 where it dies."""
    assert callable(life)
    try:
        life()
    except RunDied as death:
        typer.echo(f"hisparsim realrun: rank {os.environ['RANK']}: {death}", err=True)
        raise typer.Exit(EXIT_DIED) from None


def _show(run: RealRun, out: Path | None, as_json: bool) -> None:
    from hisparsim.results.directory import to_json
    from hisparsim.results.metrics import run_row

    from .replaying import write_real_run

    row = run_row(run.result)
    if as_json:
        typer.echo(to_json(row))
    else:
        for name, value in row.items():
            typer.echo(f"{name:32} {value}")
    if out is not None:
        write_real_run(run, out)
        typer.echo(f"run: {out}", err=True)
