"""The report of a sweep: one HTML file whose table sorts and filters in the browser, without any server."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ReportError
from .figures import Figure
from .figures.style import policy_colour
from .numbers import three_digits
from .sweep_data import Cell, SweepData, metric_name, number
from .sweep_figures import X_METRIC, Y_METRIC, draw_sweep

__all__ = ["SweepData", "render_sweep_page", "write_sweep_report"]

PAGE_NAME = "index.html"
SHOWN_FIRST = (
    "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "output_tokens_per_s",
    "total_tokens_per_s_per_gpu", "tokens_per_s_per_user", "mean_running", "num_preemptions", "hot_hit_rate",
    "host_memory_gib", "bound_by",
)  # fmt: skip
"""Metrics whose columns are shown before anyone asks for others."""


def write_sweep_report(data: SweepData, directory: Path) -> Path:
    """Change: write ``index.html`` and one PNG a figure into an existing directory; returns the page.

    Raises:
        ReportError: the sweep has no rows.
    """
    figures = draw_sweep(data)
    for figure in figures:
        (directory / f"{figure.name}.png").write_bytes(figure.png)
    page = directory / PAGE_NAME
    page.write_text(render_sweep_page(data, figures), encoding="utf-8")
    return page


def render_sweep_page(data: SweepData, figures: list[Figure]) -> str:
    """Query: the page as HTML. Raises ReportError where the sweep has no rows."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if not data.rows:
        raise ReportError("the report of a sweep needs at least one scenario")
    environment = Environment(
        loader=PackageLoader("hisparsim_reports"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    columns = _columns(data)
    shown = [
        {"title": f.title, "caption": f.caption, "name": f.name, "data": b64encode(f.png).decode("ascii")}
        for f in figures
    ]
    failed = [row for row in data.rows if row["error"] is not None]
    told = {
        "columns": columns,
        "rows": [[row[column["name"]] for column in columns] for row in data.ran],
        "colours": {policy: policy_colour(policy) for policy in data.policies},
        "x": X_METRIC,
        "y": Y_METRIC,
    }
    return environment.get_template("sweep.html.j2").render(
        title=f"Sweep over {data.title}",
        paragraph=sweep_paragraph(data),
        figures=shown,
        failed=[[*(_text(row[axis]) for axis in data.axes), row["error"]] for row in failed],
        axes=data.axes,
        # No string inside can end the script element.
        data=json.dumps(told, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    )


def sweep_paragraph(data: SweepData) -> str:
    """Query: what was asked and which scenario is best, in plain words."""
    ran, num_failed = data.ran, len(data.rows) - len(data.ran)
    sentences = [f"{len(data.rows)} scenarios vary {', '.join(data.axes) or 'nothing'}."]
    if num_failed:
        sentences.append(f"{num_failed} of them failed; their errors are listed below.")
    feasible = [row for row in ran if row["feasible"]]
    if data.constraints:
        asked = " and ".join(data.constraints)
        sentences.append(f"{len(feasible)} meet {asked}.")
    for metric, maximize in data.objectives:
        known = [(value, row) for row in feasible if (value := number(row, metric)) is not None]
        if not known:
            continue
        value, best = (max if maximize else min)(known, key=lambda pair: pair[0])
        settings = ", ".join(f"{axis} {_text(best[axis])}" for axis in data.axes if best[axis] is not None)
        way = "highest" if maximize else "lowest"
        sentences.append(f"The {way} {metric_name(metric)} is {three_digits(value)}, with {settings}.")
    return " ".join(sentences)


def _columns(data: SweepData) -> list[dict[str, Any]]:
    """Query: columns of the page's table: axes first, then metrics."""
    first = list(dict.fromkeys(["policy", *data.axes]))
    sample: Mapping[str, Cell] = data.rows[0]
    names = first + [name for name in sample if name not in first and name != "error"]
    objectives = [metric for metric, _ in data.objectives]
    shown = {*first, *SHOWN_FIRST, *objectives, *(["pareto"] if objectives else []), "search"}
    shown |= {"feasible"} if data.constraints else set()
    return [
        {
            "name": name,
            "axis": name in first,
            "number": all(row[name] is None or number(row, name) is not None for row in data.ran),
            "shown": name in shown,
        }
        for name in names
    ]


def _text(value: Cell) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
