"""``hisparsim validate``: the same workloads simulated and for real, with the error of every metric."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .calibrate import scenario_of_device
from .printing import format_rows, print_json, say

if TYPE_CHECKING:
    from hisparsim_realrun.validation import PolicyCheck, Validation

CALIBRATION_FILE = "calibration.json"
NOT_PASSED = 1
SERVES_NOTHING = "never-admit"
"""The policy for tests that lets no request in."""


def validate(
    trace: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="A trace; default: three workloads of our own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy's name; repeats. Default: four of them.")
    ] = None,
    every_policy: Annotated[bool, typer.Option("--every-policy", help="All policies there are.")] = False,
    scenario: Annotated[Path | None, typer.Option(help="Scenario file; default: the device's own.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    layers: Annotated[int | None, typer.Option(help="The model's first layers only.", min=1)] = None,
    experts: Annotated[int | None, typer.Option(help="Its first experts only.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads on a CPU.", min=1)] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration of this machine; default: measure one first.")
    ] = None,
    calibration_scale: Annotated[
        float, typer.Option(help="Multiplies the requests of each probe of that calibration.", min=0.02)
    ] = 1.0,
    requests: Annotated[
        int, typer.Option(help="Requests of a workload; cells of fewer than 200 are not judged.", min=8)
    ] = 320,
    reruns: Annotated[int, typer.Option(help="Measured runs of one cell, for the noise.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="New directory: report, runs, calibration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Play workloads under policies in both worlds and compare what users would see.

    Exit code 1: a judged cell is off by more than its bound and its noise, or the machine is too noisy.
    """
    import tempfile

    from hisparsim.results.directory import refuse_existing
    from hisparsim.serving.policies import POLICIES as KNOWN
    from hisparsim.serving.policies import policy_class
    from hisparsim_realrun.calibration_source import FileCalibration, SpreadCalibration
    from hisparsim_realrun.devices import open_device
    from hisparsim_realrun.machine import describe_machine, versions
    from hisparsim_realrun.options import RunOptions
    from hisparsim_realrun.validation import Validation
    from hisparsim_realrun.validation import validate as play
    from hisparsim_realrun.validation_workloads import POLICIES, trace_workload, workloads
    from hisparsim_traces import load

    if out is not None:
        refuse_existing(out)
    options = RunOptions(device=device, threads=threads)
    chosen_policies = tuple(
        policy or (name for name in (KNOWN if every_policy else POLICIES) if name != SERVES_NOTHING)
    )
    for chosen in chosen_policies:
        policy_class(chosen)
    with tempfile.TemporaryDirectory(prefix="hisparsim-validate-") as name:
        folder = Path(name)
        base = scenario_of_device(device, scenario, overrides, layers, experts, folder)
        source = (
            SpreadCalibration(base, options, folder / CALIBRATION_FILE, scale=calibration_scale, progress=say)
            if calibration is None
            else FileCalibration(calibration)
        )
        played = workloads(device, requests)
        if trace is not None:
            played = (trace_workload(load(trace, limit=base.workload.limit)),)
        machine = describe_machine(open_device(device, threads=threads)) | {"versions": versions()}
        validation = Validation(device, machine)
        play(base, played, chosen_policies, validation, options, source, num_reruns=reruns, progress=say)
        validation.calibration = _described(source.file)
        if out is not None:
            write_validation(validation, source.file, out)
    if as_json:
        print_json(validation.as_json())
    else:
        _show(validation)
    if out is not None:
        say(f"report: {out / 'index.html'}")
    if validation.verdict.value != "passed":
        raise typer.Exit(NOT_PASSED)


def write_validation(validation: Validation, calibration: Path, out: Path) -> None:
    """Change: the directory of a validation: page, JSON, both runs of every cell, the calibration."""
    import shutil

    from hisparsim.results.directory import published, to_json, write_run
    from hisparsim_reports.validation_page import Pair, write_validation_page

    with published(out) as directory:
        pairs = []
        for check in validation.checks:
            place = directory / f"{check.workload}-{check.policy}"
            place.mkdir()
            write_run(check.simulated, place / "simulated")
            write_run(check.measured, place / "measured")
            pairs.append(Pair(check.workload, check.simulated, check.measured))
        document = validation.as_json()
        (directory / "validation.json").write_text(to_json(document) + "\n", encoding="utf-8")
        shutil.copyfile(calibration, directory / CALIBRATION_FILE)
        write_validation_page(document, pairs, directory)


def _described(file: Path) -> dict[str, Any]:
    """Query: what the validation's document says of its calibration."""
    from hisparsim.cost.calibration_file import read_calibration

    made = read_calibration(file)
    errors = {
        name: {phase.value: fit.sum_error for phase, fit in part.fits.items()}
        for name, part in made.parts.items()
    }
    return {"date": made.date, "notes": list(made.notes), "left_out_sum_error": errors}


def _show(validation: Validation) -> None:
    rows = [row for check in validation.checks for row in _rows(check)]
    headers = ("workload", "policy", "metric", "simulated", "measured", "error", "noise", "bound", "")
    typer.echo(format_rows(headers, rows))
    judged = validation.judged
    if validation.rerun_of is not None:
        say(f"noise of whole runs from {validation.rerun_of}")
    typer.echo(
        f"{sum(check.passed for check in judged)} of {len(judged)} judged cells pass, "
        f"{validation.quiet_share:.0%} have an interval below their bound: {validation.verdict.value}"
    )


def _rows(check: PolicyCheck) -> list[tuple[str, ...]]:
    def percent(value: Any, sign: str = "") -> str:
        return "–" if value is None else f"{value:{sign}.1%}"

    return [
        (
            check.workload,
            check.policy,
            metric.name,
            f"{metric.simulated:.4g}",
            f"{metric.measured:.4g}",
            percent(metric.rel_error, "+"),
            percent(metric.noise_rel),
            percent(metric.bound) if metric.judged else "",
            ("pass" if metric.passed else "MISS") if metric.judged else "",
        )
        for metric in check.metrics
        if metric.judged or metric.name in SHOWN
    ]


SHOWN = (
    "output_tokens_per_s",
    "ttft_s.p50",
    "ttft_s.p95",
    "tpot_s.p50",
    "tpot_s.p95",
    "e2e_s.p95",
    "mean_running",
    "num_preemptions",
    "d2h_bytes",
    "h2d_bytes",
)
"""Metrics of the printed table; ``--json`` and the report have all."""
