"""Tables as data: a title, headers and rows of text, printed by the command line and by the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparsim.results import RunResult
from hisparsim.results.metrics import Metrics, compute_metrics

from .numbers import DASH, byte_count, count, seconds, share, three_digits


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are finished text; the first column is aligned left, the others right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def policy_table(runs: Sequence[RunResult], metrics: Sequence[Metrics] | None = None) -> Table:
    """Query: one row a policy with what decides between policies."""
    measured = [compute_metrics(run) for run in runs] if metrics is None else metrics
    rows = [
        (
            run.policy,
            f"{count(m.num_finished)}/{count(m.num_requests)}",
            seconds(m.ttft_s.p50),
            seconds(m.ttft_s.p99),
            seconds(m.tpot_s.p50),
            three_digits(m.output_tokens_per_s),
            three_digits(m.mean_running),
            count(m.num_preemptions),
            byte_count(m.h2d_bytes),
            share(m.hot_hit_rate),
            DASH if m.offered_load is None else f"{m.offered_load:.2f}×",
            (m.bound_by or "–").replace("_", " "),
        )
        for run, m in zip(runs, measured, strict=True)
    ]
    headers = (
        "policy",
        "finished",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "output tok/s",
        "running",
        "preempted",
        "host to GPU",
        "hot hits",
        "offered load",
        "bound by",
    )
    return Table("Policies", headers, tuple(rows))


def detail_table(runs: Sequence[RunResult], metrics: Sequence[Metrics]) -> Table:
    """Query: every metric under its dotted name, one column a policy."""
    flats = [m.flat() for m in metrics]
    names = list(flats[0]) if flats else []
    rows = [(name, *(cell(name, flat[name]) for flat in flats)) for name in names]
    return Table("All metrics", ("metric", *(run.policy for run in runs)), tuple(rows))


def cost_table(runs: Sequence[RunResult]) -> Table | None:
    """Query: where the steps' time went, each term's share of the sum of terms; None without terms."""
    totals = [{term: int(run.steps[f"cost_{term}_ns"].sum()) for term in run.cost_terms} for run in runs]
    terms = list(dict.fromkeys(term for total in totals for term in total))
    if not terms:
        return None
    rows = [
        (
            term.replace("_", " "),
            *(share(total[term] / sum(total.values())) if total.get(term) else "–" for total in totals),
        )
        for term in terms
        if any(total.get(term) for total in totals)
    ]
    headers = ("term of the step cost", *(run.policy for run in runs))
    return Table("Where the time goes", headers, tuple(rows))


def cell(name: str, value: float | int | str | None) -> str:
    """Query: a metric's value as text, its unit read from the metric's name."""
    if value is None or isinstance(value, str):
        return (value or "–").replace("_", " ")
    if name.endswith("_bytes"):
        return byte_count(value)
    if name.split(".")[0].endswith("per_s"):
        return three_digits(value)
    if name.split(".")[0].endswith("_s"):
        return seconds(value)
    if name in ("hot_hit_rate", "resident_share"):
        return share(value)
    return count(value) if isinstance(value, int) else three_digits(value)
