"""Columns of a sweep's tables: the metrics of a run under their dotted names, with types.

Beside the metrics of :class:`hisparsim.results.metrics.Metrics` stand a few that sweeps compare by:

| column | meaning |
|---|---|
| ``num_gpus`` | GPUs of the run, tp x dp |
| ``output_tokens_per_s_per_gpu``, ``total_tokens_per_s_per_gpu`` | throughput over ``num_gpus`` |
| ``tokens_per_s_per_user`` | 1 / ``tpot_s.mean``: the speed that one user sees |
| ``host_memory_gib`` | pinned host memory that the policy uses, all replicas, GiB |
| ``num_rejected`` | requests that were refused |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from hisparsim.results import RequestStatus, RunResult
from hisparsim.results.distribution import STATISTICS
from hisparsim.results.metrics import Metrics, compute_metrics
from hisparsim.specs.errors import nearest

from .errors import SweepError

if TYPE_CHECKING:
    import pyarrow as pa

Cell: TypeAlias = float | int | str | bool | None
Record: TypeAlias = Mapping[str, Cell]
"""One finished run: metric -> value, ``error`` (None where it ran) and ``wall_s``."""

ERROR, WALL = "error", "wall_s"


def _metric_types() -> dict[str, type]:
    types: dict[str, type] = {}
    for field in dataclasses.fields(Metrics):
        named = str(field.type)
        if named == "Distribution":
            types |= {f"{field.name}.{statistic}": float for statistic in STATISTICS}
        elif named == "SteadyState" or "str" in named:
            types["steady_state" if named == "SteadyState" else field.name] = str
        else:
            types[field.name] = float if "float" in named else int
    return types


METRICS: Mapping[str, type] = MappingProxyType(
    {
        **_metric_types(),
        "num_rejected": int,
        "num_gpus": int,
        "output_tokens_per_s_per_gpu": float,
        "total_tokens_per_s_per_gpu": float,
        "tokens_per_s_per_user": float,
        "host_memory_gib": float,
    }
)
"""Dotted name -> type of every metric column, in the order of the tables."""

HIGHER_IS_BETTER = frozenset(
    name
    for name in METRICS
    if name.endswith("_per_s") or "_per_s_per_" in name or name in ("hot_hit_rate", "resident_share")
)
"""Metrics of which more is better; of the others less is."""


def numeric_metric(name: str) -> str:
    """Query: the name, if it is a metric that can be compared.

    Raises:
        SweepError: unknown (the nearest is named), or text.
    """
    if name not in METRICS:
        close = nearest(name, METRICS)
        hint = f" (did you mean {close!r}?)" if close else ""
        raise SweepError(f"unknown metric {name!r}{hint}; known: {', '.join(METRICS)}")
    if METRICS[name] is str:
        raise SweepError(
            f"metric {name!r} is text and cannot be compared; choose a number such as ttft_s.p99"
        )
    return name


def record_of(result: RunResult, host_memory_gib: float) -> dict[str, Cell]:
    """Query: the record of a finished run.

    Args:
        host_memory_gib: pinned host memory that the policy uses, all replicas.
    """
    flat = compute_metrics(result).flat()
    num_gpus = int(result.summary.get("num_gpus") or 1)
    tpot_s = flat["tpot_s.mean"]
    extra: dict[str, Cell] = {
        "num_rejected": int(result.has_status(RequestStatus.REJECTED).sum()),
        "num_gpus": num_gpus,
        "output_tokens_per_s_per_gpu": _number(flat["output_tokens_per_s"]) / num_gpus,
        "total_tokens_per_s_per_gpu": _number(flat["total_tokens_per_s"]) / num_gpus,
        "tokens_per_s_per_user": 1.0 / _number(tpot_s) if tpot_s else None,
        "host_memory_gib": host_memory_gib,
    }
    values: dict[str, Cell] = {name: {**flat, **extra}[name] for name in METRICS}
    return {**values, ERROR: None, WALL: result.wall_s}


def failed_record(error: str) -> dict[str, Cell]:
    """Query: the record of a run that ended with an error."""
    return {**dict.fromkeys(METRICS), ERROR: error, WALL: None}


def nested(row: Mapping[str, Cell], names: Iterable[str]) -> dict[str, Any]:
    """Query: the named metrics with distributions as mappings, as ``hisparsim replay --json`` prints them."""
    values: dict[str, Any] = {}
    for name in names:
        head, _, statistic = name.partition(".")
        if statistic:
            values.setdefault(head, {})[statistic] = row[name]
        else:
            values[name] = row[name]
    return values


def arrow_type(kind: type) -> pa.DataType:
    """Query: the column type of a Python type."""
    import pyarrow as pa

    return {float: pa.float64(), int: pa.int64(), str: pa.string(), bool: pa.bool_()}[kind]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
