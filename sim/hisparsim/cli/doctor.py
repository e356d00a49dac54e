"""``hisparsim doctor``: is this machine fit for real runs, and what would a validation take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .printing import format_rows, print_json, say

if TYPE_CHECKING:
    from hisparsim_realrun.doctor import Diagnosis

UNHEALTHY = 1


def doctor(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Compute threads on a CPU.", min=1)] = None,
    estimate: Annotated[
        bool, typer.Option(help="Also estimate a validation's time, by a rough calibration.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Examine the machine: driver, GPUs, links by host placement, limits, kernel self-tests, versions.

    Exit code 1: a self-test failed.
    """
    from hisparsim_realrun.doctor import examine

    found = examine(device, threads=threads, with_estimate=estimate, progress=say)
    if as_json:
        print_json(found.as_json())
    else:
        _show(found)
    if not found.is_healthy:
        raise typer.Exit(UNHEALTHY)


def _show(found: Diagnosis) -> None:
    machine = found.machine
    typer.echo(f"machine   {machine['name']}, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}")
    if found.driver is not None:
        typer.echo(f"driver    {found.driver}")
    typer.echo("versions  " + ", ".join(f"{name} {text}" for name, text in found.versions.items()))
    for place in found.places:
        socket = "socket unknown" if place.numa_node is None else f"socket {place.numa_node}"
        typer.echo(f"GPU {place.index}     {place.name}, {place.bus}, {socket} {place.link}")
    rows = [
        (
            "RAM" if link.gpu is None and not found.places else "all" if link.gpu is None else str(link.gpu),
            link.situation,
            "-" if link.host_node is None else str(link.host_node),
            "-" if link.h2d_bytes_per_s is None else f"{link.h2d_bytes_per_s / 1e9:.1f}",
            "-" if link.d2h_bytes_per_s is None else f"{link.d2h_bytes_per_s / 1e9:.1f}",
        )
        for link in found.links
    ]
    typer.echo(format_rows(("GPU", "copies", "host socket", "to GPU GB/s", "to host GB/s"), rows))
    for name, value in found.limits.items():
        typer.echo(f"{name}: {'no limit' if value is None else f'{value / 2**30:.2f} GiB'}")
    for test in found.tests:
        typer.echo(f"{'pass' if test.passed else 'FAIL'}  {test.name}: {test.detail}")
    plan = found.plan
    took = "" if plan.estimate_s is None else f", about {plan.estimate_s / 60:.0f} minutes as loaded now"
    typer.echo(
        f"a validation would play {plan.num_cells} runs of {plan.model} with {plan.num_layers} layers and "
        f"{plan.num_experts} experts, a GPU pool of {plan.gpu_pool_bytes / 2**20:.0f} MiB and a host pool of "
        f"{plan.host_pool_bytes / 2**20:.0f} MiB{took}"
    )
    for sentence in found.findings:
        typer.echo(f"mind: {sentence}")
