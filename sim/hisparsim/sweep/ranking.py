"""What is better: objectives, constraints, and the front of rows that none of the others beats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .columns import HIGHER_IS_BETTER, Record, numeric_metric
from .errors import SweepError


@dataclass(frozen=True)
class Objective:
    """A metric to push one way."""

    metric: str
    maximize: bool

    def cost(self, record: Record) -> float:
        """Query: a number of which less is better; infinite where the metric has no value."""
        value = record.get(self.metric)
        if value is None or isinstance(value, str):
            return math.inf
        return -float(value) if self.maximize else float(value)


@dataclass(frozen=True)
class Constraint:
    """The most, or the least, that a metric may be. One of the two is given."""

    metric: str
    max: float | None = None
    min: float | None = None

    def excess(self, record: Record) -> float:
        """Query: by how much a record breaks the constraint, relative to the limit; <= 0 where it holds.

        A metric without a value (nothing finished) breaks it wholly.
        """
        value = record.get(self.metric)
        if value is None or isinstance(value, str):
            return math.inf
        limit = self.max if self.max is not None else self.min
        assert limit is not None
        over = float(value) - limit if self.max is not None else limit - float(value)
        return over / abs(limit) if limit else over

    def __str__(self) -> str:
        return f"{self.metric} <= {self.max:g}" if self.max is not None else f"{self.metric} >= {self.min:g}"


def parse_objectives(written: Any) -> tuple[Objective, ...]:
    """Query: the objectives of ``[objectives]``: lists of metrics to ``maximize`` and to ``minimize``.

    Raises:
        SweepError: an unknown key or metric, or a metric that is pushed both ways.
    """
    if not isinstance(written, Mapping) or set(written) - {"maximize", "minimize"}:
        raise SweepError("[objectives] takes `maximize` and `minimize`, each a list of metrics")
    found: list[Objective] = []
    for way in ("maximize", "minimize"):
        names = written.get(way, [])
        if not isinstance(names, list):
            raise SweepError(f"[objectives] {way} = {names!r}: give a list of metrics")
        found += [Objective(numeric_metric(str(name)), way == "maximize") for name in names]
    metrics = [objective.metric for objective in found]
    twice = [metric for i, metric in enumerate(metrics) if metric in metrics[:i]]
    if twice:
        raise SweepError(f"[objectives] {twice[0]} is given twice: maximize it or minimize it")
    return tuple(found)


def parse_constraints(written: Any) -> tuple[Constraint, ...]:
    """Query: the constraints of ``[constraints]``: metric -> ``{max = ..}`` and, or, ``{min = ..}``.

    Raises:
        SweepError: an unknown key or metric, no limit, or limits that exclude each other.
    """
    if not isinstance(written, Mapping):
        raise SweepError('[constraints] takes lines like "ttft_s.p99" = {max = 10}')
    found: list[Constraint] = []
    for name, limits in written.items():
        metric = numeric_metric(str(name))
        if not isinstance(limits, Mapping) or not limits or set(limits) - {"max", "min"}:
            raise SweepError(f"constraint {name} = {limits!r}: give {{max = ..}} or {{min = ..}}")
        for way, limit in limits.items():
            if not isinstance(limit, int | float) or isinstance(limit, bool) or not math.isfinite(limit):
                raise SweepError(f"constraint {name}: {way} = {limit!r} is not a finite number")
        if "max" in limits and "min" in limits and limits["min"] > limits["max"]:
            raise SweepError(
                f"contradictory constraint {name}: at least {limits['min']} and at most {limits['max']}"
            )
        found += [Constraint(metric, **{way: float(limit)}) for way, limit in limits.items()]
    return tuple(found)


def parse_slo(text: str) -> Constraint:
    """Query: the constraint of ``metric=limit``: at most for latencies, at least for throughputs.

    Raises:
        SweepError: no such metric, or no number.
    """
    name, equals, limit = text.partition("=")
    metric = numeric_metric(name.strip())
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if not equals or not math.isfinite(value):
        raise SweepError(f"--slo {text!r}: expected metric=number, such as ttft_s.p99=10")
    if value < 0 or (value == 0 and metric.split(".")[0].endswith("_s")):
        raise SweepError(
            f"--slo {text!r}: no {metric} is {'below' if value else 'at'} 0; give a limit above it"
        )
    return Constraint(metric, min=value) if metric in HIGHER_IS_BETTER else Constraint(metric, max=value)


def violated(record: Record, constraints: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Query: the constraints that a record breaks."""
    return tuple(constraint for constraint in constraints if constraint.excess(record) > 0)


def dominates(left: Sequence[float], right: Sequence[float]) -> bool:
    """Query: whether costs ``left`` are nowhere worse than ``right`` and somewhere better."""
    return all(a <= b for a, b in zip(left, right, strict=True)) and any(
        a < b for a, b in zip(left, right, strict=True)
    )


def fronts(costs: Sequence[Sequence[float]]) -> list[int]:
    """Query: [n] the front each row stands on: 0 = beaten by none, 1 = beaten by rows of front 0 only, ..."""
    front = [-1] * len(costs)
    left = set(range(len(costs)))
    level = 0
    while left:
        best = [i for i in left if not any(dominates(costs[j], costs[i]) for j in left)]
        for i in best:
            front[i] = level
        left -= set(best)
        level += 1
    return front


def order(
    records: Sequence[Record], objectives: Sequence[Objective], constraints: Sequence[Constraint]
) -> list[int]:
    """Query: indices from best to worst.

    Rows that ran come before rows that failed, rows that meet all constraints before the others (those by how
    much they break them), then by front, then by the sum of relative distances to the best of each objective,
    then as they stand.
    """
    costs = [[objective.cost(record) for objective in objectives] for record in records]
    level = fronts(costs) if objectives else [0] * len(records)
    low = [min((c[k] for c in costs if math.isfinite(c[k])), default=0.0) for k in range(len(objectives))]
    high = [max((c[k] for c in costs if math.isfinite(c[k])), default=0.0) for k in range(len(objectives))]

    def distance(row: Sequence[float]) -> float:
        spans = zip(row, low, high, strict=True)
        return sum((value - least) / (most - least) if most > least else 0.0 for value, least, most in spans)

    def key(i: int) -> tuple[bool, float, int, float, int]:
        broken = sum(max(constraint.excess(records[i]), 0.0) for constraint in constraints)
        return (records[i].get("error") is not None, broken, level[i], distance(costs[i]), i)

    return sorted(range(len(records)), key=key)
