"""The page of a validation: the verdict, every cell with its noise, the figures, the error budget."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import Figure
from .numbers import DASH, three_digits
from .tables import Table
from .validation_figures import Pair, draw_validation

__all__ = ["Pair", "cell_table", "render_validation", "write_validation_page"]

PAGE_NAME = "index.html"


def write_validation_page(document: Mapping[str, Any], pairs: Sequence[Pair], directory: Path) -> Path:
    """Change: write ``index.html`` and one PNG a figure into an existing directory; returns the page.

    Args:
        document: what ``hisparsim validate --json`` prints.
        pairs: both runs of each of its entries.
    """
    figures = draw_validation(document, pairs)
    for figure in figures:
        (directory / f"{figure.name}.png").write_bytes(figure.png)
    page = directory / PAGE_NAME
    page.write_text(render_validation(document, figures), encoding="utf-8")
    return page


def render_validation(document: Mapping[str, Any], figures: Sequence[Figure]) -> str:
    """Query: the page as HTML, the figures inside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hisparsim_reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [
        {"title": f.title, "caption": f.caption, "data": b64encode(f.png).decode("ascii")} for f in figures
    ]
    return environment.get_template("validation.html.j2").render(
        verdict=str(document["verdict"]),
        sentence=sentence(document),
        machine=[(key, str(value)) for key, value in document["machine"].items() if key != "versions"],
        notes=list(document["calibration"].get("notes", ())),
        cells=cell_table(document),
        budgets=[budget_table(entry) for entry in document["workloads"]],
        figures=shown,
    )


def sentence(document: Mapping[str, Any]) -> str:
    """Query: the verdict in words."""
    noise = document["reruns"]
    told = f"{document['num_passed']} of {document['num_judged']} judged cells pass; "
    told += f"{document['quiet_share']:.0%} have an interval below their bound"
    if noise["of"]:
        told += f"; noise of whole runs from {noise['of']}"
    return told + "."


def cell_table(document: Mapping[str, Any]) -> Table:
    """Query: one row a cell, judged ones marked."""
    rows = [
        (
            entry["name"],
            entry["policy"],
            check["name"],
            three_digits(check["simulated"]),
            three_digits(check["measured"]),
            _percent(check["rel_error"], "+"),
            _percent(check["noise_rel"]),
            _percent(check["bound"]) if check["judged"] else DASH,
            ("pass" if check["passed"] else "miss") if check["judged"] else "",
        )
        for entry in document["workloads"]
        for check in entry["metrics"]
    ]
    headers = ("workload", "policy", "metric", "simulated", "measured", "error", "noise", "bound", "")
    return Table("Cells", headers, tuple(rows))


def budget_table(entry: Mapping[str, Any]) -> Table:
    """Query: the error budget of one policy on one workload."""
    rows = [
        (
            line["part"].replace("_", " "),
            f"{line['measured_s']:.3f}",
            f"{line['priced_s']:.3f}",
            f"{line['simulated_s']:.3f}",
            _percent(line["median_step_error"], "+"),
            _percent(line["share_of_error"], "+"),
        )
        for line in entry["budget"]["lines"]
        if line["measured_s"] > 0.0005 or line["priced_s"] > 0.0005
    ]
    headers = (
        "part",
        "measured s",
        "same steps priced s",
        "simulated s",
        "median step error",
        "of the error",
    )
    return Table(f"{entry['name']}, {entry['policy']}", headers, tuple(rows))


def _percent(value: float | None, sign: str = "") -> str:
    return DASH if value is None else f"{value:{sign}.1%}"
