"""Commands of the kernel package: `aot`, `bench`, `plot`, `check`. Mounted as `hisparsim kernels`, or run as
`python -m hisparsim_kernels`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Triton kernels: compile ahead of time, measure, check on a GPU.", no_args_is_help=True
)

FAILED = 1
BAD_INPUT = 2


def _refuse(error: Exception) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(BAD_INPUT)


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise _refuse(ValueError(f"device is {device!r}; known: cuda, cpu"))


def _check_writable(out: Path | None) -> None:
    """Refuse a file that cannot be written before minutes are spent on what it should hold."""
    if out is not None and not out.parent.is_dir():
        raise _refuse(ValueError(f"{out} cannot be written: {out.parent} is not a directory; make it first"))


def _chosen(names: str | None) -> tuple[str, ...]:
    from hisparsim_kernels.registry import KERNEL_MODULES

    if not names:
        return KERNEL_MODULES
    wanted = tuple(name.strip() for name in names.split(","))
    unknown = [name for name in wanted if name not in KERNEL_MODULES]
    if unknown:
        known = ", ".join(KERNEL_MODULES)
        raise _refuse(ValueError(f"no kernel module {', '.join(unknown)}; known: {known}"))
    return wanted


def _aot_table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['arch']}, triton {report['triton']}", title_justify="left")
    for heading in (
        "kernel",
        "config",
        "regs",
        "stack",
        "spills",
        "shared",
        "tensor core",
        "async 16 B",
        "result",
    ):
        table.add_column(
            heading, justify="left" if heading in ("kernel", "config", "tensor core", "result") else "right"
        )
    for entry in report["kernels"]:
        cores = " ".join(f"{name} {count}" for name, count in entry["tensor_core"].items())
        figures = ("registers", "stack_bytes", "spill_instructions", "shared_bytes")
        verdict = "ok" if entry["passed"] else "; ".join(entry["violations"])
        table.add_row(
            entry["name"],
            entry["config"],
            *(str(entry[figure]) for figure in figures),
            cores or "-",
            str(entry["async_copy_128"]),
            verdict,
        )
    return table


@app.command()
def aot(
    arch: Annotated[
        str, typer.Option(help="Architecture: sm_80, sm_90, sm_100, sm_120; sm_90a is sm_90.")
    ] = "sm_90",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    modules: Annotated[
        str | None, typer.Option(help="Only these kernel modules, separated by commas.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Compiling processes.")] = 2,
) -> None:
    """Compile every kernel and configuration without a GPU; fail if one breaks its limits."""
    from hisparsim_kernels.aot import CAPABILITIES, report_in_own_process
    from hisparsim_kernels.errors import AotError

    family = arch.removesuffix("a")  # triton always compiles sm_90 and later with their own instructions
    if family not in CAPABILITIES:
        raise _refuse(AotError(f"unknown architecture {arch!r}; known: {', '.join(CAPABILITIES)}"))
    try:
        report = {**report_in_own_process(family, _chosen(modules), processes), "arch": arch}
    except AotError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console(width=160).print(_aot_table(report))
    if not all(entry["passed"] for entry in report["kernels"]):
        raise typer.Exit(FAILED)


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="cuda measures the kernels, cpu the references.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    modules: Annotated[
        str | None, typer.Option(help="Only these kernel modules, separated by commas.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this CSV file.")] = None,
) -> None:
    """Measure kernels: time, GB/s, TFLOP/s and share of the roof, inside CUDA graphs."""
    chosen = _chosen(modules)
    from hisparsim_kernels import bench as measuring
    from hisparsim_kernels.errors import KernelInputError
    from hisparsim_kernels.registry import bench_cases

    _check_device(device)
    _check_writable(out)
    try:
        rows = measuring.run(bench_cases(chosen), device, sys.stderr)
    except KernelInputError as error:
        raise _refuse(error) from error
    if out is not None:
        measuring.write_csv(rows, out)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table()
    for heading in ("kernel", "case", "by", "us", "cold us", "GB/s", "TFLOP/s", "roof", "share"):
        table.add_column(heading)
    for row in rows:
        cells = (row.time_us, row.cold_us, row.gb_per_s, row.tflop_per_s)
        figures = ("-" if cell is None else f"{cell:,.1f}" for cell in cells)
        share = "-" if row.share_of_roof is None else f"{row.share_of_roof:.0%}"
        table.add_row(row.kernel, row.case, row.implementation, *figures, row.roof, share)
    Console(width=160).print(table)


@app.command()
def plot(
    rows: Annotated[Path, typer.Argument(help="CSV file that `bench --out` wrote.")],
    out: Annotated[Path, typer.Option(help="Figure to write: .png, .svg or .pdf.")],
) -> None:
    """Draw the rows of a benchmark."""
    from hisparsim_kernels.bench import read_csv
    from hisparsim_kernels.bench_plot import plot as draw
    from hisparsim_kernels.errors import KernelInputError

    if not rows.is_file():
        raise _refuse(ValueError(f"{rows} does not exist; write it with `bench --out {rows}`"))
    _check_writable(out)
    try:
        draw(read_csv(rows), out)
    except KernelInputError as error:
        raise _refuse(error) from error


@app.command()
def check(
    device: Annotated[
        str, typer.Option(help="cuda; cpu rehearses the value checks in the interpreter.")
    ] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
    budget_s: Annotated[
        float, typer.Option(help="Leave out checks once this many seconds are spent.")
    ] = 480.0,
) -> None:
    """Check the kernels on a GPU: host memory, values, graph replay, bandwidth of the gather, published
    times.
    """
    from hisparsim_kernels.device_check import run_checks
    from hisparsim_kernels.errors import DeviceError, InterpreterMismatchError

    _check_device(device)
    _check_writable(out)
    try:
        results = run_checks(device, budget_s, sys.stderr)
    except (DeviceError, InterpreterMismatchError) as error:
        raise _refuse(error) from error
    text = json.dumps([asdict(result) for result in results], indent=1)
    if out is not None:
        out.write_text(text)
    print(text)
    if any(result.passed is False for result in results):
        raise typer.Exit(FAILED)
