"""The table of a sweep: one row a scenario in the order of the axes, whoever ran it and in whatever order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .axes import POLICY_KEY, Value
from .columns import ERROR, METRICS, WALL, Cell, Record, nested
from .plan import Plan, Planned
from .ranking import fronts, violated


@dataclass(frozen=True)
class SweepTable:
    """Rows of a sweep with typed columns.

    ``columns``: ``policy``, the axes (``policy.name`` is ``policy``), ``trace`` and ``seed``, the metrics,
    ``feasible`` (all constraints hold), ``pareto`` (no feasible row beats it in every objective), ``error``.
    """

    axes: tuple[str, ...]
    """Columns that vary by the sweep's axes, the policy first where it varies."""
    columns: Mapping[str, type]
    rows: tuple[dict[str, Cell], ...]
    wall_s: tuple[float | None, ...]
    """Seconds each row's simulation took where it was made; not part of the table."""


def sweep_table(
    plan: Plan,
    planned: Sequence[Planned],
    records: Mapping[str, Record],
    *,
    extra: Mapping[str, Sequence[str | None]] | None = None,
) -> SweepTable:
    """Query: the table of the scenarios of ``planned`` whose runs are in ``records``, or that failed.

    Args:
        extra: further text columns, one value for each of ``planned``.
    """
    definition = plan.definition
    keys = [key for key in definition.axis_keys if key != POLICY_KEY]
    kinds = {key: _kind([one.point.values.get(key) for one in planned]) for key in keys}
    several_traces = len(definition.traces) > 1
    several_seeds = len(definition.seeds) > 1
    rows: list[dict[str, Cell]] = []
    walls: list[float | None] = []
    for i, one in enumerate(planned):
        record = _record(one, records)
        if record is None:
            continue
        policy = one.point.values.get(POLICY_KEY, plan.base.policy.name)
        seed = plan.base.seed if one.point.seed is None else one.point.seed
        row: dict[str, Cell] = {"policy": str(policy)}
        row |= {key: _cell(one.point.values.get(key), kinds[key]) for key in keys}
        row |= {"trace": plan.traces[one.point.trace].name, "seed": seed}
        row |= {name: values[i] for name, values in (extra or {}).items()}
        row |= {name: record.get(name) for name in METRICS}
        row |= {
            "feasible": record[ERROR] is None and not violated(record, definition.constraints),
            ERROR: record[ERROR],
        }
        rows.append(row)
        wall = record.get(WALL)
        walls.append(float(wall) if isinstance(wall, int | float) else None)
    best = _pareto(plan, rows)
    for row, on_front in zip(rows, best, strict=True):
        error = row.pop(ERROR)
        row |= {"pareto": on_front, ERROR: error}
    varied = (["policy"] if POLICY_KEY in definition.axis_keys else []) + keys
    varied += ["trace"] * several_traces + ["seed"] * several_seeds
    columns = {
        "policy": str,
        **kinds,
        "trace": str,
        "seed": int,
        **dict.fromkeys(extra or (), str),
        **METRICS,
        "feasible": bool,
        "pareto": bool,
        ERROR: str,
    }
    return SweepTable(tuple(varied), columns, tuple(rows), tuple(walls))


def json_rows(table: SweepTable) -> dict[str, list[dict[str, Any]]]:
    """Query: ``{"runs": [...], "failed": [...]}`` with the axis values and the metrics as in replay."""
    runs: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    names = [name for name in table.columns if name not in METRICS and name != ERROR]
    for row, wall_s in zip(table.rows, table.wall_s, strict=True):
        told: dict[str, Any] = {name: row[name] for name in names}
        if row[ERROR] is not None:
            failed.append(
                {**{k: v for k, v in told.items() if k not in ("feasible", "pareto")}, ERROR: row[ERROR]}
            )
        else:
            runs.append({**told, **nested(row, METRICS), WALL: wall_s})
    return {"runs": runs, "failed": failed}


def _record(planned: Planned, records: Mapping[str, Record]) -> Record | None:
    if planned.task is None:
        return {ERROR: planned.error, WALL: None}
    return records.get(planned.task.fingerprint)


def _pareto(plan: Plan, rows: Sequence[Record]) -> list[bool]:
    objectives = plan.definition.objectives
    chosen = [i for i, row in enumerate(rows) if row["feasible"]]
    if not objectives:
        return [False] * len(rows)
    level = fronts([[objective.cost(rows[i]) for objective in objectives] for i in chosen])
    best = {i for i, front in zip(chosen, level, strict=True) if front == 0}
    return [i in best for i in range(len(rows))]


def _kind(values: Sequence[Value]) -> type:
    """Query: the column type that holds the values of an axis."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int}:
        return int
    if kinds <= {int, float}:
        return float
    return bool if kinds == {bool} else str


def _cell(value: Value, kind: type) -> Cell:
    return None if value is None else kind(value)
