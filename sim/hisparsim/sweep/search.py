"""Searching a grid instead of running all of it: successive halving, or Optuna's multi-objective sampler.

A candidate is a combination of the axes; its seeds are run together and their metrics averaged. Both searches
run candidates on a prefix of the trace first. One that already breaks a constraint there is pruned: load only
builds up as a trace goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .axes import Value, override
from .columns import ERROR, METRICS, Cell, Record
from .errors import SweepError
from .grid import Point
from .plan import Plan, Planned, plan_overrides
from .ranking import Constraint, Objective, order, violated
from .runner import Runner

ETA = 3
"""One candidate in so many goes on to the next, so many times longer prefix."""
MIN_PREFIX = 50
"""Requests of the shortest prefix."""


class SearchKind(Enum):
    """How the scenarios of a sweep are gone through."""

    GRID = "grid"
    HALVING = "halving"
    OPTUNA = "optuna"


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate: how many requests it was run on at last, and why not on all."""

    num_requests: int | None
    """None: on the whole trace."""
    reason: str


COMPLETE = Verdict(None, "whole trace")


class Candidates:
    """The combinations of a plan's axes, each with the scenarios of its seeds."""

    def __init__(self, plan: Plan, runner: Runner) -> None:
        if len(plan.traces) != 1:
            raise SweepError("a search plays one trace; name one, or use the grid")
        if not plan.definition.objectives:
            raise SweepError("a search needs [objectives]: what to maximize or minimize")
        self.plan, self.runner = plan, runner
        self.objectives: tuple[Objective, ...] = plan.definition.objectives
        self.constraints: tuple[Constraint, ...] = plan.definition.constraints
        grouped: dict[tuple[tuple[str, Value], ...], list[Planned]] = {}
        for planned in plan.planned:
            grouped.setdefault(tuple(planned.point.values.items()), []).append(planned)
        self.members = list(grouped.values())
        self._place = {key: i for i, key in enumerate(grouped)}
        self.trace = next(iter(plan.traces.values()))

    def __len__(self) -> int:
        return len(self.members)

    def find(self, values: Mapping[str, Value]) -> int:
        """Query: the candidate with these axis values."""
        return self._place[tuple(values.items())]

    def runs(self, i: int, num_requests: int | None) -> list[Planned]:
        """Query: the runs of a candidate on a prefix (None: the whole trace), one a seed."""
        if num_requests is None or num_requests >= self.trace.num_requests:
            return self.members[i]
        return [self._cut(planned.point, num_requests) for planned in self.members[i]]

    def evaluate(self, chosen: Iterable[int], num_requests: int | None) -> list[Record]:
        """Change: run candidates on a prefix; their records, averaged over seeds."""
        groups = [self.runs(i, num_requests) for i in chosen]
        self.runner.run([planned.task for group in groups for planned in group if planned.task])
        return [combine([self._record(planned) for planned in group]) for group in groups]

    def _record(self, planned: Planned) -> Record:
        return {ERROR: planned.error} if planned.task is None else self.runner.record(planned.task)

    def _cut(self, point: Point, num_requests: int) -> Planned:
        overrides = [override(key, value) for key, value in point.values.items()]
        overrides += [f"seed={point.seed}"] if point.seed is not None else []
        overrides.append(f"workload.limit={num_requests}")
        return plan_overrides(self.plan.base, point, self.plan.traces, overrides)


def combine(records: Sequence[Record]) -> dict[str, Cell]:
    """Query: the mean of each number over records that all ran; the first error where one failed."""
    errors = [record[ERROR] for record in records if record.get(ERROR) is not None]
    if errors:
        return {**dict.fromkeys(METRICS), ERROR: errors[0]}
    mean: dict[str, Cell] = {ERROR: None}
    for name, kind in METRICS.items():
        values = [record[name] for record in records]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        mean[name] = values[0] if kind is str or len(numbers) < len(values) else sum(numbers) / len(numbers)
    return mean


def prefixes(plan: Plan, num_candidates: int) -> list[int | None]:
    """Query: the lengths of the rungs, shortest first, None = the whole trace.

    In a closed loop a prefix holds at least two conversations for each user, so that the load is the same.
    """
    trace = next(iter(plan.traces.values()))
    total = min(trace.num_requests, plan.base.workload.limit or trace.num_requests)
    least = MIN_PREFIX
    users = plan.base.workload.concurrency
    if users is not None:
        starts = (trace.parent < 0).nonzero()[0]
        least = int(starts[2 * users]) if len(starts) > 2 * users else total
    rungs: list[int | None] = [None]
    length, left = total // ETA, num_candidates
    while length >= least and left > 1:
        rungs.insert(0, length)
        length, left = length // ETA, left // ETA
    return rungs


def successive_halving(candidates: Candidates) -> dict[int, Verdict]:
    """Change: run all candidates on a short prefix, the best third on one three times longer, and so on.

    Returns what became of each. Candidates that break a constraint are pruned as long as one holds them all.
    """
    alive = list(range(len(candidates)))
    verdicts: dict[int, Verdict] = {}
    rungs = prefixes(candidates.plan, len(alive))
    for k, length in enumerate(rungs):
        records = candidates.evaluate(alive, length)
        if length is None:
            return verdicts | dict.fromkeys(alive, COMPLETE)
        ranked = order(records, candidates.objectives, candidates.constraints)
        sound = [i for i in ranked if records[i][ERROR] is None and not _broken(records[i], candidates)]
        keep = max(1, -(-len(candidates) // ETA ** (k + 1)))
        kept = (sound or ranked)[:keep]
        for i in ranked:
            if i not in kept:
                verdicts[alive[i]] = Verdict(length, _why(records[i], candidates))
        alive = [alive[i] for i in sorted(kept)]
    return verdicts


def _broken(record: Record, candidates: Candidates) -> tuple[Constraint, ...]:
    return violated(record, candidates.constraints)


def _why(record: Record, candidates: Candidates) -> str:
    if record[ERROR] is not None:
        return "failed"
    broken = _broken(record, candidates)
    return f"pruned: not {broken[0]}" if broken else "others were better"


def searched_rows(
    candidates: Candidates, verdicts: Mapping[int, Verdict]
) -> tuple[list[Planned], dict[str, list[str | None]]]:
    """Query: the scenarios that were looked at, in the order of the axes, and what became of each."""
    planned: list[Planned] = []
    told: list[str | None] = []
    for i in sorted(verdicts):
        verdict = verdicts[i]
        members = candidates.runs(i, verdict.num_requests)
        planned += members
        cut = "" if verdict.num_requests is None else f" (first {verdict.num_requests} requests)"
        told += [verdict.reason + cut] * len(members)
    return planned, {"search": told}


def describe(kind: SearchKind, trials: int, seed: int) -> dict[str, Any] | None:
    """Query: what decides which runs a search makes, None for the grid."""
    if kind is SearchKind.GRID:
        return None
    return {"kind": kind.value} | ({"trials": trials, "seed": seed} if kind is SearchKind.OPTUNA else {})
