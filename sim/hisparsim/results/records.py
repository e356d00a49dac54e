"""What a run leaves behind: one row a request, one row a step, weighted inter-token gaps, scalars.

The simulator and the real runner fill the same record. Times are integer nanoseconds from the start of
the run, bytes are for one GPU. Metrics are computed from it in :mod:`hisparsim.results.metrics`; nothing
here knows how a record was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import ResultError

Columns: TypeAlias = Mapping[str, NDArray[Any]]


class RequestStatus(IntEnum):
    """How a request ended. The value is the code in the ``status`` column."""

    FINISHED = 0
    """Produced every token its trace row declares (less what was truncated)."""
    STOPPED = 1
    """Met a stop condition before its declared length."""
    CANCELLED = 2
    """Cancelled by its user, waiting or running."""
    REJECTED = 3
    """Refused at submission: it could never be served."""
    SKIPPED = 4
    """Left out by the rule for prompts longer than the window; never submitted."""
    UNFINISHED = 5
    """Still in the system when the run ended."""


SERVED = (RequestStatus.FINISHED, RequestStatus.STOPPED)
"""Statuses of requests that count as completed in the metrics."""

REQUEST_COLUMNS: Mapping[str, type] = MappingProxyType(
    {
        "request_id": np.int64,
        "session": np.int64,  # -1 = no conversation
        "turn": np.int64,
        "arrival_ns": np.int64,  # -1 = never: a turn whose conversation ended before
        "admitted_ns": np.int64,  # first admission; -1 = never
        "first_token_ns": np.int64,  # -1 = never
        "finish_ns": np.int64,  # last token, or cancellation; -1 = never
        "prompt_tokens": np.int64,
        "output_tokens": np.int64,  # produced
        "declared_output_tokens": np.int64,
        "hit_tokens": np.int64,  # prompt tokens found in a prefix cache at the first admission
        "num_preemptions": np.int64,
        "status": np.int8,  # RequestStatus
    }
)
"""Columns of ``RunResult.requests``, all required, with their types. -1 stands for "never" in a time."""

STEP_COLUMNS: Mapping[str, type] = MappingProxyType(
    {
        "start_ns": np.int64,
        "duration_ns": np.int64,
        "num_decodes": np.int64,
        "decode_tokens": np.int64,
        "prefill_tokens": np.int64,
        "running": np.int64,
        "waiting": np.int64,
        "num_full": np.int64,  # requests by residency; they add up to `running`
        "num_mixed": np.int64,
        "num_none": np.int64,
        "free_blocks": np.int64,  # GPU blocks that can be allocated, cached ones included
        "index_blocks": np.int64,
        "resident_pinned_blocks": np.int64,
        "resident_released_blocks": np.int64,  # still readable, may be reused at any time
        "hot_blocks": np.int64,
        "other_blocks": np.int64,
        "cached_free_blocks": np.int64,  # free, and hold a prefix that a request could hit
        "host_blocks_used": np.int64,
        "h2d_bytes": np.int64,  # moved for this step, one GPU
        "d2h_bytes": np.int64,
        "missed_millirows": np.int64,  # rows of all layers read through the gather, in thousandths
        "preemptions": np.int64,  # cumulative
    }
)
"""Known columns of ``RunResult.steps``. Only ``start_ns`` and ``duration_ns`` are required: a policy without
a host tier leaves out what it lacks. One column ``cost_<term>_ns`` a cost term stands beside them."""

REQUIRED_STEP_COLUMNS = ("start_ns", "duration_ns")


def is_cost_column(name: str) -> bool:
    """Query: whether a step column holds one term of the step's cost."""
    return name.startswith("cost_") and name.endswith("_ns")


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of one policy over one trace.

    Raises:
        ResultError: a column is missing, unknown or of another length than its neighbours.
    """

    policy: str
    scenario: Mapping[str, Any]
    """The scenario as resolved, JSON-able: section -> key -> value."""
    trace: Mapping[str, Any]
    """name, format, sha256, num_requests, sum_input_tokens, sum_output_tokens, span_s and more."""
    wall_s: float
    """Wall-clock seconds of the simulation loop; not part of the result proper."""
    summary: Mapping[str, Any]
    """Scalars the loop hands over: offered_load, bound_by, counters, pool sizes. JSON-able.

    Known keys (each may be missing): ``offered_load``, ``bound_by``, ``blocked_share`` (reason -> share of
    the time with work waiting), ``num_gpu_blocks``, ``gpu_block_bytes``, ``num_host_blocks``,
    ``host_block_bytes``, ``num_preemptions``, ``num_stall_steps``, ``h2d_bytes``, ``d2h_bytes`` (one GPU),
    ``missed_rows``, ``hot_hit_rows``, ``resident_rows`` (rows of all layers that selections fell on),
    ``tokens_truncated``, ``tokens_stopped``, ``tokens_cancelled``, ``num_steps``, ``num_events``,
    ``node_memory``, ``h2d_bytes_per_s``, ``d2h_bytes_per_s`` (what one GPU's link carries at most),
    ``num_gpus``, ``notes`` (sentences for people).
    """
    requests: Columns
    steps: Columns
    itl: tuple[NDArray[np.int64], NDArray[np.int64]] = field(
        default_factory=lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64))
    )
    """Inter-token gaps of served requests: (gap_ns [n], weight [n]); a weight counts equal gaps."""

    def __post_init__(self) -> None:
        _check_columns("requests", self.requests, REQUEST_COLUMNS, tuple(REQUEST_COLUMNS))
        _check_columns("steps", self.steps, STEP_COLUMNS, REQUIRED_STEP_COLUMNS)
        gaps, weights = self.itl
        if len(gaps) != len(weights):
            raise ResultError(f"itl: {len(gaps)} gaps and {len(weights)} weights: they must pair up")

    @property
    def num_requests(self) -> int:
        return len(self.requests["request_id"])

    @property
    def num_steps(self) -> int:
        return len(self.steps["start_ns"])

    @property
    def cost_terms(self) -> tuple[str, ...]:
        """Names of the cost terms the steps were priced with, in column order."""
        return tuple(name[len("cost_") : -len("_ns")] for name in self.steps if is_cost_column(name))

    def has_status(self, *statuses: RequestStatus) -> NDArray[np.bool_]:
        """Query: [requests] whether each request ended in one of these statuses."""
        mask: NDArray[np.bool_] = np.isin(self.requests["status"], [int(status) for status in statuses])
        return mask


def _check_columns(
    table: str, columns: Columns, known: Mapping[str, type], required: tuple[str, ...]
) -> None:
    """Query: raise ResultError on the first missing, unknown or ragged column."""
    missing = [name for name in required if name not in columns]
    if missing:
        raise ResultError(f"{table}: column {missing[0]!r} is missing; required: {', '.join(required)}")
    length = len(columns[required[0]])
    for name, column in columns.items():
        if name not in known and not (table == "steps" and is_cost_column(name)):
            raise ResultError(f"{table}: unknown column {name!r}; known: {', '.join(known)}, cost_<term>_ns")
        if column.ndim != 1 or len(column) != length:
            raise ResultError(
                f"{table}: column {name!r} has shape {column.shape}, its neighbours ({length},)"
            )
        if not np.issubdtype(column.dtype, np.integer):
            raise ResultError(f"{table}: column {name!r} is {column.dtype}; every column holds integers")
