"""A planned sweep: its scenarios resolved, each with the run that it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, load

from .axes import override
from .definition import Definition
from .grid import Point
from .identity import fingerprint
from .shelf import Shelf, put
from .task import Task, one_line


@dataclass(frozen=True)
class Planned:
    """One scenario of a sweep: the task that answers it, or why there is none."""

    point: Point
    task: Task | None
    error: str | None = None


@dataclass(frozen=True)
class Plan:
    """All scenarios of a sweep in the order of the axes, and the traces they play."""

    definition: Definition
    planned: tuple[Planned, ...]
    traces: Mapping[str, Trace]
    """By the name they are given in the sweep."""
    base: Scenario

    def tasks(self) -> tuple[Task, ...]:
        """Query: the distinct runs, in the order of the axes."""
        found = {planned.task.fingerprint: planned.task for planned in self.planned if planned.task}
        return tuple(found.values())

    def shelf(self, directory: Path) -> Shelf:
        """Change: store the traces under ``directory`` for workers."""
        names = {name: shelf_name(trace) for name, trace in self.traces.items()}
        return Shelf({name: put(self.traces[name], directory / stored) for name, stored in names.items()})

    def description(self, search: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
        """Query: what the sweep is, JSON-able, and the sha256 of all that decides which runs it makes.

        Objectives and constraints may change between two calls with ``--resume``; nothing else may.
        """
        definition = self.definition
        asked: dict[str, Any] = {
            "traces": [
                {"name": trace.name, "sha256": trace.sha256, "num_requests": trace.num_requests}
                for trace in self.traces.values()
            ],
            "scenario": self.base.model_dump(mode="json"),
            "axes": [[list(axis.keys), [list(row) for row in axis.values]] for axis in definition.axes],
            "when": [[c.key, {k: list(v) for k, v in c.only_if.items()}] for c in definition.conditions],
            "seeds": list(definition.seeds),
            "search": None if search is None else dict(search),
        }
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        judged = {
            "objectives": [
                [o.metric, "maximize" if o.maximize else "minimize"] for o in definition.objectives
            ],
            "constraints": [str(constraint) for constraint in definition.constraints],
        }
        return {**asked, **judged}, digest


def plan_sweep(definition: Definition) -> Plan:
    """Query: the plan of a sweep; loads its traces.

    Raises:
        SweepError, ScenarioError, PolicyError: the sweep cannot be made as written.
        TraceError: a trace cannot be read.
    """
    points = definition.points()
    base = Scenario.load(definition.scenario, definition.fixed_overrides())
    traces = {name: load(name, limit=definition.limit) for name in definition.traces}
    return Plan(definition, tuple(plan_point(base, point, traces) for point in points), traces, base)


def plan_point(base: Scenario, point: Point, traces: Mapping[str, Trace]) -> Planned:
    """Query: a point with its task; a scenario that cannot be run has its error in its place."""
    overrides = [override(key, value) for key, value in point.values.items()]
    if point.seed is not None:
        overrides.append(f"seed={point.seed}")
    return plan_overrides(base, point, traces, overrides)


def plan_overrides(
    base: Scenario, point: Point, traces: Mapping[str, Trace], overrides: Sequence[str]
) -> Planned:
    """Query: as :func:`plan_point`, with all overrides given."""
    try:
        scenario = base.with_overrides(overrides)
        mark = fingerprint(scenario, traces[point.trace])
    except ValueError as error:
        return Planned(point, None, one_line(error))
    return Planned(point, Task(mark, scenario, point.trace))


def shelf_name(trace: Trace) -> str:
    """Query: the name under which a trace's columns are stored."""
    return f"{trace.sha256[:16]}-{trace.num_requests}"
