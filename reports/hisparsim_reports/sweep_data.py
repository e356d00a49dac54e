"""A finished sweep as the report takes it: rows of plain values, and which columns vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cell = float | int | str | bool | None
Row = Mapping[str, Cell]

NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "end to end",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "output_tokens_per_s_per_gpu": "output tokens/s/GPU",
    "total_tokens_per_s_per_gpu": "total tokens/s/GPU",
    "tokens_per_s_per_user": "tokens/s/user",
    "host_memory_gib": "host memory, GiB",
}
"""Words for metrics; others stand under their own names."""


@dataclass(frozen=True)
class SweepData:
    """Rows of a sweep.

    Each row holds ``policy``, every column of ``axes``, the metrics under their dotted names, ``feasible``,
    ``pareto`` and ``error`` (None where the scenario ran).
    """

    title: str
    axes: tuple[str, ...]
    """Columns that vary, ``policy`` and ``seed`` among them where they do."""
    rows: Sequence[Row]
    objectives: tuple[tuple[str, bool], ...] = ()
    """(metric, whether more is better)."""
    constraints: tuple[str, ...] = ()

    @property
    def ran(self) -> list[Row]:
        """The rows that ran."""
        return [row for row in self.rows if row["error"] is None]

    @property
    def policies(self) -> list[str]:
        """Policies in the order of the rows."""
        return list(dict.fromkeys(str(row["policy"]) for row in self.ran))

    @property
    def numeric_axes(self) -> list[str]:
        """Axes of numbers with at least two values among the rows that ran, ``seed`` left out."""
        return [axis for axis in self.axes if axis != "seed" and len(self.numbers(axis)) > 1]

    def numbers(self, axis: str) -> list[float]:
        """Query: the numbers of a column among the rows that ran, ascending; empty if it holds text."""
        values = {row[axis] for row in self.ran if row[axis] is not None}
        if any(isinstance(value, str | bool) for value in values):
            return []
        return sorted(float(value) for value in values if isinstance(value, int | float))


def metric_name(metric: str) -> str:
    """Query: a metric in words, with its statistic and unit: ``ttft_s.p99`` is "TTFT p99, s"."""
    head, _, statistic = metric.partition(".")
    if metric in NAMES:
        return NAMES[metric]
    if head in NAMES:
        return f"{NAMES[head]} {statistic}, s"
    return metric.replace("_", " ")


def number(row: Row, name: str) -> float | None:
    """Query: the value of a column as a number, None where it has none."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
