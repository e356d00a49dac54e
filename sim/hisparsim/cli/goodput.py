"""``hisparsim goodput``: the highest load that each policy sustains under a service level objective."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .printing import format_rows, print_json, say
from .replay import DEFAULT_POLICIES
from .sweep import choice, execution_of, progress

if TYPE_CHECKING:
    from hisparsim.specs.scenario import Scenario
    from hisparsim.sweep.goodput import Goodput

DEFAULT_SEEDS = (0, 1, 2)


def goodput(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file or a bundled trace's name.")],
    slo: Annotated[list[str], typer.Option(help="metric=limit, such as ttft_s.p99=10; repeats.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeats. Default: the main ones.")
    ] = None,
    load: Annotated[
        str,
        typer.Option(help="What is raised: rate (Poisson), trace (its own pattern) or concurrency (users)."),
    ] = "rate",
    scenario: Annotated[Path | None, typer.Option(help="Scenario file (TOML).")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first requests of the trace only.", min=1)] = None,
    seed: Annotated[list[int] | None, typer.Option(help="A seed; repeats. Default: 0, 1, 2.", min=0)] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.", min=1)] = None,
    executor: Annotated[str, typer.Option(help="processes or ray.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find by bisection the highest arrival rate or concurrency that each policy sustains under an SLO."""
    from hisparsim.serving.policies import policy_class
    from hisparsim.specs.scenario import Scenario
    from hisparsim.sweep.errors import SweepError
    from hisparsim.sweep.goodput import Load, find_goodput
    from hisparsim.sweep.ranking import parse_slo
    from hisparsim.sweep.runner import running
    from hisparsim.sweep.shelf import Shelf, put
    from hisparsim_traces import load as load_trace

    kind = choice("--load", load, Load)
    execution = execution_of(executor, jobs, address)
    objectives = [parse_slo(text) for text in slo]
    names = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    for name in names:
        policy_class(name)
    base = Scenario.load(scenario, overrides or [])
    _require_free(base, kind)
    played = load_trace(trace, limit=limit)
    seeds = seed or DEFAULT_SEEDS
    with (
        progress("runs", None) as advance,
        running(
            lambda place: Shelf({"trace": put(played, place / "trace")}),
            execution,
            on_done=lambda *_: advance(1),
        ) as runner,
    ):
        found = find_goodput(base, played, names, objectives, kind, seeds, runner, "trace")
    if all(each.error is not None for each in found):
        raise SweepError(f"no policy can be run here; {found[0].policy}: {found[0].error}")
    if as_json:
        print_json({"policies": [_row(each, kind) for each in found]})
        return
    typer.echo(_table(found, kind.value))
    for each in found:
        if each.error is not None:
            say(f"{each.policy}: {each.error}")
        elif each.load == 0:
            say(f"{each.policy}: {each.violates} breaks even at the lightest load that was tried; loosen it")
        elif each.violates is None:
            say(f"{each.policy}: the objective held at every load that was tried")
        if each.num_rejected:
            say(f"{each.policy}: {each.num_rejected} requests of the trace were refused")


def _require_free(base: Scenario, load: Any) -> None:
    """Query: raise SweepError where ``--set`` fixes what the search raises, or would put aside."""
    from hisparsim.specs.scenario import Origin
    from hisparsim.sweep.errors import SweepError

    for key in ("workload.concurrency", "workload.rate_per_s"):
        if base.origin(key) is Origin.SET and getattr(base.workload, key.split(".")[1]) is not None:
            raise SweepError(
                f"--set {key} contradicts the search, which sets the load itself (--load {load.value}); "
                "leave it out"
            )


def _row(found: Goodput, load: Any) -> dict[str, Any]:
    """Query: one entry of ``policies``: the load, its interval, and what bound the first run beyond it."""
    from hisparsim.sweep.goodput import Load

    what = "concurrency" if load is Load.CONCURRENCY else "rate_per_s"
    return {
        "policy": found.policy,
        what: found.load,
        "ci95": None if found.ci95 is None else list(found.ci95),
        "bound_by": found.bound_by,
        "violates": found.violates,
        "by_seed": list(found.by_seed),
        "num_rejected": found.num_rejected,
        "error": found.error,
    }


def _table(found: list[Goodput], load: str) -> str:
    what = "users" if load == "concurrency" else "arrivals/s"
    rows = [
        [
            each.policy,
            f"{each.load:.4g}",
            "–" if each.ci95 is None else f"{each.ci95[0]:.4g} to {each.ci95[1]:.4g}",
            each.bound_by or "–",
            each.violates or "–",
        ]
        for each in found
    ]
    return format_rows(["policy", what, "95 % interval", "bound by", "breaks first"], rows)
