"""The report: one HTML file that needs no network, and the figures as PNG files beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsim.results import RunResult
from hisparsim.results.metrics import Metrics, compute_metrics

from .errors import ReportError
from .figures import Figure, draw_all
from .figures.style import policy_colour
from .narrative import paragraph
from .numbers import count, three_digits
from .tables import Table, cost_table, detail_table, policy_table

PAGE_NAME = "index.html"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One value of the scenario: where it came from and how it was derived or published."""

    key: str
    value: str
    origin: str
    source: str


def write_report(runs: Sequence[RunResult], directory: Path) -> Path:
    """Change: write ``index.html`` and one PNG a figure into an existing directory; returns the page.

    Raises:
        ReportError: there are no runs.
    """
    figures = draw_all(runs)
    for figure in figures:
        (directory / f"{figure.name}.png").write_bytes(figure.png)
    page = directory / PAGE_NAME
    page.write_text(render_page(runs, figures), encoding="utf-8")
    return page


def render_page(runs: Sequence[RunResult], figures: Sequence[Figure]) -> str:
    """Query: the page as HTML. Raises ReportError where there are no runs."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if not runs:
        raise ReportError("a report needs at least one run")
    environment = Environment(
        loader=PackageLoader("hisparsim_reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    metrics = [compute_metrics(run) for run in runs]
    tables: list[Table | None] = [detail_table(runs, metrics), cost_table(runs)]
    shown = [
        {"title": f.title, "caption": f.caption, "data": b64encode(f.png).decode("ascii")} for f in figures
    ]
    traces = {str(run.trace.get("name", "trace")): run.trace for run in runs}
    return environment.get_template("report.html.j2").render(
        title=f"{', '.join(traces)}: {', '.join(run.policy for run in runs)}",
        paragraph=paragraph(runs, metrics),
        policies=policy_table(runs, metrics),
        colours={run.policy: policy_colour(run.policy) for run in runs},
        figures=shown,
        tables=[table for table in tables if table is not None],
        steady=steadiness(runs, metrics),
        notes=[(run.policy, note) for run in runs for note in run.summary.get("notes", ())],
        summaries=summary_table(runs),
        settings=setting_rows(runs[0].scenario),
        differing=differing_settings(runs),
        traces=[[(key, plain(value)) for key, value in trace.items()] for trace in traces.values()],
    )


def steadiness(runs: Sequence[RunResult], metrics: Sequence[Metrics]) -> list[tuple[str, str]]:
    """Query: (policies, verdict with its reason), policies of one verdict together."""
    grouped: dict[str, list[str]] = {}
    for run, m in zip(runs, metrics, strict=True):
        told = f"{m.steady_state.verdict.value} ({m.steady_state.reason})"
        grouped.setdefault(told, []).append(run.policy)
    return [(", ".join(policies), told) for told, policies in grouped.items()]


def setting_rows(scenario: Mapping[str, Any]) -> list[SettingRow]:
    """Query: the scenario, one row a value, with origins where it carries them (``resolved``)."""
    resolved = scenario.get("resolved")
    if resolved:
        return [
            SettingRow(
                row["key"], plain(row["value"]), str(row.get("origin", "")), str(row.get("source", ""))
            )
            for row in resolved
        ]
    return [SettingRow(key, plain(value), "", "") for key, value in flatten(scenario)]


def differing_settings(runs: Sequence[RunResult]) -> Table | None:
    """Query: scenario values that are not the same in all runs, None where there are none."""
    flats = [dict(flatten(run.scenario)) for run in runs]
    keys = list(dict.fromkeys(key for flat in flats for key in flat if not key.startswith("resolved")))
    rows = [
        (key, *(plain(flat.get(key)) for flat in flats))
        for key in keys
        if any(flat.get(key) != flats[0].get(key) for flat in flats)
    ]
    headers = ("setting", *(run.policy for run in runs))
    return Table("What differs between the runs", headers, tuple(rows)) if rows else None


def summary_table(runs: Sequence[RunResult]) -> Table:
    """Query: the counters that the loop handed over, one column a run."""
    flats = [{key: value for key, value in flatten(run.summary) if key != "notes"} for run in runs]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    rows = [(key, *(plain(flat.get(key)) for flat in flats)) for key in keys]
    return Table("Counters", ("counter", *(run.policy for run in runs)), tuple(rows))


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Query: nested mappings as dotted keys, in order."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def plain(value: Any) -> str:
    """Query: a value as text for a table cell."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 1e12 else count(value)
    if isinstance(value, float):
        return f"{value:g}" if value == round(value) and abs(value) < 1e6 else three_digits(value)
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return str(value)
