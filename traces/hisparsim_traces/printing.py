"""What the commands print for people. stdout, plain text."""

from __future__ import annotations

import math
from typing import Any

import typer

from .catalogue import Entry
from .trace import Trace


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_info(about: dict[str, Any]) -> None:
    """The statistics of a trace, a line each."""

    def line(label: str, text: str) -> None:
        typer.echo(f"{label:<22} {text}")

    line("trace", f"{about['name']} ({about['format']})")
    line("sha256", about["sha256"])
    dropped = (
        ", ".join(f"{count:,} {reason}" for reason, count in about["rows_dropped"].items()) or "none dropped"
    )
    line("rows", f"{about['rows_read']:,} read, {about['rows_kept']:,} kept; {dropped}")
    for reason, count in about["rows_changed"].items():
        line("changed", f"{count:,} {reason}")
    for note in about["notes"]:
        line("note", note)
    for side in ("input", "output"):
        figures = about[f"{side}_tokens"]
        shown = ", ".join(f"{name} {_figure(value)}" for name, value in figures.items())
        line(f"{side} tokens", f"sum {about[f'sum_{side}_tokens']:,}; {shown}")
    line("over", ", ".join(f"{mark} {share:.2%}" for mark, share in about["share_above"].items()))
    line(
        "arrivals",
        f"{_figure(about['span_s'])} s, {_figure(about['rate_per_s'])} requests/s, "
        f"gap CV {_figure(about['interarrival_cv'])}, {about['ties']:,} ties, "
        f"{about['inversions']:,} inversions",
    )
    line(
        "burstiness", ", ".join(f"{window} {_figure(value)}" for window, value in about["burstiness"].items())
    )
    line("sessions", _figure(about["num_sessions"]))
    if about["kinds"] is not None:
        without = about["num_requests"] - sum(about["kinds"].values())
        counted = [f"{name} {count:,}" for name, count in about["kinds"].items()]
        line("kinds", ", ".join([*counted, *([f"none {without:,}"] if without else [])]))
    if about["block_tokens"] is not None:
        line("blocks", f"{about['block_tokens']} tokens, ideal reuse {about['ideal_block_reuse']:.2%}")
    line("ideal token reuse", f"{about['ideal_token_reuse']:.2%}")
    curve = about["reuse_by_cache"]
    if curve is not None:
        kind = "exact" if curve["exact"] else f"from a sample of {curve['sample']:g} of the ids"
        line("reuse by LRU cache", f"{kind}; tokens of cache: share of blocks found")
        for tokens, share in zip(curve["cache_tokens"], curve["hit_share"], strict=True):
            line("", f"{tokens:>14,}: {share:.2%}")


def rows_of(trace: Trace) -> list[dict[str, Any]]:
    """The requests as JSON objects; unknown times are null."""

    def seconds(value: float) -> float | None:
        return None if math.isnan(value) else value

    return [
        {
            "line": int(trace.source_line[row]),
            "arrival_s": seconds(float(trace.arrival_s[row])),
            "input_tokens": int(trace.input_tokens[row]),
            "output_tokens": int(trace.output_tokens[row]),
            "session": int(trace.session[row]) if trace.session[row] >= 0 else None,
            "turn": int(trace.turn[row]),
            "parent": int(trace.parent[row]) if trace.parent[row] >= 0 else None,
            "think_s": seconds(float(trace.think_s[row])),
            "shared_prefix_tokens": int(trace.shared_prefix_tokens[row]),
            "num_blocks": len(trace.blocks(row)),
            "kind": None if trace.kind is None else trace.kind.of(row),
        }
        for row in range(trace.num_requests)
    ]


def print_rows(trace: Trace) -> None:
    """The requests as a table."""
    rows = rows_of(trace)
    names = list(rows[0])
    typer.echo("  ".join(f"{name:>12}" for name in names))
    for row in rows:
        typer.echo("  ".join(f"{_figure(row[name]):>{max(12, len(name))}}" for name in names))


def print_fit(report: dict[str, Any]) -> None:
    """Pairs are (real, drawn)."""
    typer.echo(f"{'figure':<28} {'real':>14} {'drawn':>14}")
    for name, value in report.items():
        if isinstance(value, dict):
            for size, pair in value.items():
                typer.echo(f"{name + ' ' + size:<28} {_figure(pair[0]):>14} {_figure(pair[1]):>14}")
        elif isinstance(value, list):
            typer.echo(f"{name:<28} {_figure(value[0]):>14} {_figure(value[1]):>14}")
        else:
            typer.echo(f"{name:<28} {_figure(value):>29}")


def print_catalogue(entries: list[Entry]) -> None:
    """A line each."""
    typer.echo(f"{'name':<24} {'format':<17} {'licence':<11} {'MB':>8}  {'fetch':<5} page")
    for entry in entries:
        size = "-" if entry.size_bytes is None else f"{entry.size_bytes / 1e6:,.1f}"
        how = "no" if entry.url is None else "yes"
        typer.echo(
            f"{entry.name:<24} {entry.format or '-':<17} {entry.licence:<11} {size:>8}  {how:<5} {entry.page}"
        )
