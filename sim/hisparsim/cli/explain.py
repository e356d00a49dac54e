"""`hisparsim explain`: the terms of one step, with the share and the source of each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hisparsim.cost.explanation import Explanation


def explain(
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="Scenario file; all defaults if left out.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeats.")] = None,
    batch: Annotated[int, typer.Option(help="Requests that decode in the step.")] = 16,
    context: Annotated[int, typer.Option(help="Context of each, tokens.")] = 80_000,
    prefill: Annotated[int, typer.Option(help="Prompt tokens computed in the step.")] = 0,
    past: Annotated[int, typer.Option(help="Tokens of that prompt computed before.")] = 0,
    resident_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the earlier context that is readable on the GPU; left out: 1 where the policy "
            "keeps all KV there, else 0."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what one step costs, term by term, and where each figure comes from."""
    from hisparsim.cost.explanation import Example, explain_step
    from hisparsim.specs.scenario import Scenario

    example = Example(batch, context, prefill, past, resident_share)
    explanation = explain_step(Scenario.load(scenario, overrides or ()), example)
    if as_json:
        typer.echo(json.dumps(_as_dict(explanation), indent=2))
    else:
        _print_table(explanation)


def _as_dict(explanation: Explanation) -> dict[str, Any]:
    scenario, load = explanation.scenario, explanation.load
    return {
        "model": scenario.model_spec.name,
        "node": scenario.node_spec.name,
        "tp": scenario.parallel.tp,
        "dp": scenario.parallel.dp,
        "policy": scenario.policy.name,
        "cost_source": scenario.cost.source.value,
        "memory": scenario.node.memory.value,
        "load": {name: value for name, value in asdict(load).items() if value is not None},
        "terms": [
            {
                "term": term.name,
                "ms": term.duration_ns / 1e6,
                "share": round(term.share, 4),
                "source": term.source,
            }
            for term in explanation.terms
        ],
        "total_ms": explanation.total_ns / 1e6,
        "h2d_bytes": explanation.cost.h2d_bytes,
        "d2h_bytes": explanation.cost.d2h_bytes,
        "front_end_ms": explanation.front_end_ns / 1e6,
    }


def _print_table(explanation: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table

    scenario, load, cost = explanation.scenario, explanation.load, explanation.cost
    mode = f"CUDA graph of {load.graph_requests}" if load.graph_requests else "eager"
    table = Table(
        title=f"{scenario.model_spec.name} on {scenario.node_spec.name}, TP{scenario.parallel.tp} "
        f"DP{scenario.parallel.dp}, policy {scenario.policy.name}: {load.num_decodes} decodes, "
        f"{load.prefill_tokens} prefill tokens, {mode}",
        title_justify="left",
    )
    table.add_column("term", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for term in explanation.terms:
        table.add_row(term.name, f"{term.duration_ns / 1e6:.3f}", f"{term.share:.1%}", term.source)
    table.add_section()
    table.add_row(
        "total", f"{explanation.total_ns / 1e6:.3f}", "100.0%", f"source {scenario.cost.source.value}"
    )
    console = Console()
    console.print(table)
    console.print(f"for one GPU: {cost.h2d_bytes:,} bytes from the host, {cost.d2h_bytes:,} bytes to it")
    if explanation.front_end_ns:
        console.print(
            f"front end of that request, before its first step: {explanation.front_end_ns / 1e6:.1f} ms"
        )
