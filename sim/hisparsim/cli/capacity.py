"""`hisparsim capacity`: how many requests fit, by the published calculator and by vLLM 0.33 itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hisparsim.specs.capacity import Capacity

DEFAULT_CONTEXTS = (8_192, 16_384, 32_768, 65_536, 81_920, 131_072, 262_144, 1_048_576)
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def capacity(
    model: Annotated[str, typer.Option(help="Model preset, or a .toml file.")] = "glm-5.3",
    node: Annotated[str, typer.Option(help="Node preset, or a .toml file.")] = "h200x8",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 8,
    dp: Annotated[int, typer.Option(help="Data parallel replicas; tp x dp may need several nodes.")] = 1,
    ep: Annotated[bool, typer.Option("--ep/--no-ep", help="Shard the routed experts over tp x dp.")] = False,
    kv: Annotated[str, typer.Option(help="Row format: fp8, fp8_ds_mla, bf16, nvfp4 or auto.")] = "fp8",
    hot_rows: Annotated[int, typer.Option(help="Hot buffer rows a request.")] = 4096,
    context: Annotated[list[int] | None, typer.Option(help="Context length in tokens; repeats.")] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="Host pool of a replica, GiB; unlimited if left out.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Weight format: fp8, nvfp4, w4a8 or bf16.")] = "fp8",
    memory: Annotated[str, typer.Option(help="GPU memory figure: nominal or reported.")] = "nominal",
    max_num_seqs: Annotated[int, typer.Option(help="Running requests of a replica at most.")] = 1024,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one engine step.")] = 32_768,
    async_depth: Annotated[int, typer.Option(help="Steps open at once; 1 = synchronous scheduling.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Also draw a figure (PNG, SVG or PDF).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print how many requests fit by context length: calculator's formula and vLLM 0.33's admission limit."""
    from hisparsim.specs.capacity import Capacity
    from hisparsim.specs.errors import ScenarioError, unknown_name
    from hisparsim.specs.kv_layout import RowFormat
    from hisparsim.specs.models import load_model
    from hisparsim.specs.nodes import MemoryFigure, load_node
    from hisparsim.specs.weights import WeightFormat

    formats = [row_format.value for row_format in RowFormat]
    if plot is not None and plot.suffix not in FIGURE_SUFFIXES:
        raise ScenarioError(f"--plot {str(plot)!r}: the name must end in {', '.join(FIGURE_SUFFIXES)}")
    if kv != "auto" and kv not in formats:
        raise unknown_name("row format", kv, [*formats, "auto"])
    if weights not in [weight.value for weight in WeightFormat]:
        raise unknown_name("weight format", weights, [weight.value for weight in WeightFormat])
    if memory not in [figure.value for figure in MemoryFigure]:
        raise unknown_name("memory figure", memory, [figure.value for figure in MemoryFigure])
    counted = Capacity(
        model=load_model(model),
        node=load_node(node),
        tp=tp,
        dp=dp,
        ep=ep,
        row_format=None if kv == "auto" else RowFormat(kv),
        hot_rows=hot_rows,
        host_gib=host_gib,
        weights=WeightFormat(weights),
        memory=MemoryFigure(memory),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_depth=async_depth,
    )
    longest = counted.model.max_position_embeddings
    contexts = context or [length for length in DEFAULT_CONTEXTS if length <= longest]
    if as_json:
        typer.echo(json.dumps(counted.as_dict(contexts), indent=2))
    else:
        _print_table(counted, contexts)
    if plot is not None:
        _draw(counted, plot)


def _print_table(counted: Capacity, contexts: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = counted.rows(contexts)
    table = Table()
    for heading in (
        "context",
        "no offload",
        "hybrid",
        "min host GiB",
        "0.33 admits",
        "dead band",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        stuck = counted.dead_band_requests(row.context_tokens)
        table.add_row(
            f"{row.context_tokens:,}",
            str(row.baseline_requests),
            str(row.hybrid_requests),
            str(row.min_host_gib),
            str(row.admission_requests),
            "" if stuck is None else str(counted.dp * stuck),
        )
    console = Console(highlight=False)
    console.print(_title(counted))
    console.print(table)
    console.print(_notes(counted))


def _title(counted: Capacity) -> str:
    facts = counted.assumptions()
    nodes = f"{counted.num_nodes} x {counted.node.name}" if counted.num_nodes > 1 else counted.node.name
    return (
        f"{facts['model']} ({facts['weights']}) on {nodes}, TP{counted.tp} DP{counted.dp}"
        f"{' EP' if counted.ep else ''}, KV {facts['row_format']} ({facts['row_bytes']} B a row), "
        f"hot rows {counted.hot_rows}"
    )


def _notes(counted: Capacity) -> str:
    budget = counted.budget
    host = "unlimited" if counted.host_gib is None else f"{counted.host_gib:g} GiB a replica"
    return (
        f"GPU memory {budget.memory_gib:.1f} GiB ({counted.memory.value}) x "
        f"{budget.gpu_memory_utilization:g} - weights {budget.weights_gib:.1f} - reserve "
        f"{budget.runtime_reserve_gib:g} = KV {budget.gpu_kv_gib:.1f} GiB a GPU; block "
        f"{counted.layout.gpu_block_bytes:,} B, without offload {counted.layout.baseline_block_bytes:,} B; "
        f"host {host}, block stride {counted.host_block_stride_bytes:,} B; "
        f"at most {counted.max_num_seqs} requests a replica.\n"
        "no offload, hybrid: the published calculator.\n"
        "0.33 admits: cold requests, by vLLM 0.33's scheduler.\n"
        "dead band: prompts of which 0.33 runs these and offloads none, until outputs grow."
    )


def _draw(counted: Capacity, path: Path) -> None:
    from hisparsim_reports.capacity_figure import draw_capacity

    curves = counted.curves()
    draw_capacity(
        path,
        context_tokens=curves.context_tokens,
        requests={
            "no offload": curves.baseline_requests,
            "hybrid, published calculator": curves.hybrid_requests,
            "hybrid, as vLLM 0.33 admits cold requests": curves.admission_requests,
        },
        dead_bands=[
            (band.first_tokens, band.last_tokens, counted.dp * band.requests) for band in curves.dead_bands
        ],
        title=_title(counted),
        note=f"GPU memory: {counted.memory.value}, KV {counted.budget.gpu_kv_gib:.1f} GiB a GPU",
    )
    typer.echo(f"figure: {path}", err=True)
