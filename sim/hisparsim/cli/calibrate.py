"""``hisparsim calibrate``: step times and links of this machine, for ``cost.source=calibration:FILE``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .printing import format_rows, print_json, say

if TYPE_CHECKING:
    from hisparsim.specs.scenario import Scenario


def calibrate(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    scenario: Annotated[
        Path | None, typer.Option(help="Scenario whose sizes to cover; default: the device's own.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    layers: Annotated[int | None, typer.Option(help="The model's first layers only.", min=1)] = None,
    experts: Annotated[int | None, typer.Option(help="Its first experts only.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads on a CPU.", min=1)] = None,
    scale: Annotated[
        float,
        typer.Option(help="Multiplies the requests of each probe; 0.2 is a rough, quick one.", min=0.02),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure every part of a step and each link on this machine with short probes, and fit the cost model.

    The probes' requests are their own: no workload that is validated later is among them.
    """
    from hisparsim.cost.calibration_file import write_calibration
    from hisparsim.results.directory import refuse_unwritable
    from hisparsim_realrun.calibration import calibrate as measure
    from hisparsim_realrun.options import RunOptions

    refuse_unwritable(out)
    with tempfile.TemporaryDirectory(prefix="hisparsim-slice-") as folder:
        chosen = scenario_of_device(device, scenario, overrides, layers, experts, Path(folder))
        run = measure(chosen, RunOptions(device=device, threads=threads), scale=scale, progress=say)
        write_calibration(run.calibration, out)
        use = how_to_use(chosen, out)
    rows = run.table()
    if as_json:
        print_json({"file": str(out), "machine": run.calibration.machine, "parts": rows})
        return
    headers = ("part", "steps", "number", "median ms", "quartiles", "left-out error", "of the sum")
    cells = [
        (
            row["part"],
            row["steps"],
            str(row["num_steps"]),
            f"{row['median_ms']:.3f}",
            f"{row['p25_ms']:.3f}..{row['p75_ms']:.3f}",
            f"{row['left_out_median_error']:.1%}",
            f"{row['left_out_sum_error']:+.1%}",
        )
        for row in rows
    ]
    typer.echo(format_rows(headers, cells))
    for note in run.calibration.notes:
        say(note)
    say(f"use it with {use}")


def how_to_use(scenario: Scenario, out: Path) -> str:
    """Change: put the preset of a sliced model beside the calibration; returns the settings that fit it."""
    model = scenario.model.preset
    if model.endswith(".toml"):
        preset = out.with_suffix(".model.toml")
        shutil.copyfile(model, preset)
        model = str(preset)
    settings = {
        "cost.source": f"calibration:{out}",
        "model.preset": model,
        "node.preset": scenario.node.preset,
        "parallel.tp": scenario.parallel.tp,
        "kv.dtype": scenario.row_format.value,
    }
    return " ".join(f"--set {key}={value}" for key, value in settings.items())


def scenario_of_device(
    device: str,
    file: Path | None,
    overrides: list[str] | None,
    layers: int | None,
    experts: int | None,
    folder: Path,
) -> Scenario:
    """Change: the device's own scenario, or a file's, with overrides; a slice is written into ``folder``."""
    from hisparsim.specs.scenario import Scenario
    from hisparsim_realrun.geometry import sliced_scenario
    from hisparsim_realrun.validation_workloads import SCALES, base_scenario

    if file is None and layers is None and experts is None:
        return base_scenario(device, folder).with_overrides(overrides or ())
    settings = SCALES[device].settings if file is None and device in SCALES else ()
    base = Scenario.load(file, (*settings, *(overrides or ())))
    return sliced_scenario(base, layers, experts, folder)
