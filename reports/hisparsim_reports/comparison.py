"""Two runs side by side, or a run and a measurement of a real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparsim.results import RunResult
from hisparsim.results.metrics import compute_metrics

from .errors import ReportError
from .measured import Measurement
from .numbers import DASH
from .tables import Table, cell

FIRST = (
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p90",
    "ttft_s.p95",
    "ttft_s.p99",
    "tpot_s.mean",
    "tpot_s.p50",
    "tpot_s.p90",
    "tpot_s.p99",
    "e2e_s.mean",
    "e2e_s.p50",
    "request_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
)
"""Metrics at the head of a comparison; the others follow in their own order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Metrics of two sides by dotted name, and what to mind when reading them."""

    names: tuple[str, str]
    sides: tuple[Mapping[str, float], Mapping[str, float]]
    notes: tuple[str, ...]

    @property
    def metrics(self) -> list[str]:
        """Metrics that both sides have, the important ones first."""
        both = [name for name in self.sides[0] if name in self.sides[1]]
        head = [name for name in FIRST if name in both]
        return head + [name for name in both if name not in head]

    def difference(self, name: str) -> float | None:
        """Query: (second - first) / first of a metric; None where the first is 0."""
        first, second = (side[name] for side in self.sides)
        return (second - first) / first if first else None

    def table(self) -> Table:
        """Query: one row a metric."""
        rows = []
        for name in self.metrics:
            difference = self.difference(name)
            shown = DASH if difference is None else f"{100 * difference:+.1f} %"
            rows.append((name, *(cell(name, side[name]) for side in self.sides), shown))
        return Table("Comparison", ("metric", *self.names, "difference"), tuple(rows))

    def as_json(self) -> dict[str, Any]:
        """Query: the comparison as plain data."""
        return {
            "names": list(self.names),
            "metrics": [
                {
                    "name": name,
                    "first": self.sides[0][name],
                    "second": self.sides[1][name],
                    "difference": self.difference(name),
                }
                for name in self.metrics
            ],
            "notes": list(self.notes),
        }


def compare_runs(first: RunResult, second: RunResult, names: tuple[str, str] | None = None) -> Comparison:
    """Query: two runs; differences of trace or scenario are noted, they are not an error."""
    notes = []
    if first.trace.get("sha256") != second.trace.get("sha256"):
        notes.append(f"The runs replay different traces: {_trace(first)} and {_trace(second)}.")
    return Comparison(
        names or (first.policy, second.policy), (_numbers(first), _numbers(second)), tuple(notes)
    )


def compare_with_measurement(run: RunResult, measured: Measurement) -> Comparison:
    """Query: a run and a real server's measurement.

    Raises:
        ReportError: the two share no metric.
    """
    comparison = Comparison(
        (run.policy, f"measured ({measured.source})"),
        (_numbers(run), measured.metrics),
        tuple(measured.definitions) + _size_notes(run, measured),
    )
    if not comparison.metrics:
        raise ReportError(f"{measured.name}: the measurement shares no metric with the run")
    return comparison


def _size_notes(run: RunResult, measured: Measurement) -> tuple[str, ...]:
    ours, theirs = compute_metrics(run).num_finished, measured.metrics.get("num_finished")
    if theirs is None or ours == theirs:
        return ()
    return (f"The run finished {ours} requests, the measurement {theirs:.0f}: not the same workload.",)


def _numbers(run: RunResult) -> dict[str, float]:
    flat = compute_metrics(run).flat()
    return {name: float(value) for name, value in flat.items() if isinstance(value, int | float)}


def _trace(run: RunResult) -> str:
    return f"{run.trace.get('name', 'unnamed')} ({run.num_requests} requests)"


def chosen_two(runs: Sequence[RunResult]) -> tuple[RunResult, RunResult]:
    """Query: the two runs to compare. Raises ReportError where there are not exactly two."""
    if len(runs) != 2:
        names = ", ".join(run.policy for run in runs)
        raise ReportError(f"two runs are needed, {len(runs)} were found ({names}); name the run directories")
    return runs[0], runs[1]
