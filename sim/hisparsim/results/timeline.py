"""A run over time, binned: requests by state, the GPU pool by kind of block, tokens and link traffic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .metrics import in_system
from .records import RunResult

DEFAULT_NUM_BINS = 480

LEVELS = (
    "running",
    "waiting",
    "num_full",
    "num_mixed",
    "num_none",
    "index_blocks",
    "resident_pinned_blocks",
    "resident_released_blocks",
    "hot_blocks",
    "other_blocks",
    "cached_free_blocks",
    "host_blocks_used",
)
"""Step columns whose mean over time a bin holds. Time between steps counts as zero: nothing runs then."""
FLOWS = ("decode_tokens", "prefill_tokens", "h2d_bytes", "d2h_bytes")
"""Step columns whose sum a bin holds, each step spread evenly over its duration."""

Timeline = Mapping[str, NDArray[np.float64]]


def bin_timeline(result: RunResult, num_bins: int = DEFAULT_NUM_BINS) -> dict[str, NDArray[np.float64]]:
    """Query: columns [num_bins]: ``start_s``, ``width_s``, ``in_system`` and the known levels and flows.

    A run without steps yields empty columns.
    """
    steps = result.steps
    start = steps["start_ns"].astype(np.float64)
    end = start + steps["duration_ns"]
    if not len(start) or end[-1] <= 0:
        return {name: np.zeros(0) for name in ("start_s", "width_s", "in_system")}
    edges = np.linspace(0.0, float(end[-1]), num_bins + 1)
    width = np.diff(edges)
    columns = {"start_s": edges[:-1] / 1e9, "width_s": width / 1e9, "in_system": _in_system(result, edges)}
    corners = np.stack((start, end), axis=1).ravel()
    for name in LEVELS:
        if name in steps:
            area = _area(corners, steps[name] * (end - start), edges)
            columns[name] = area / width
    for name in FLOWS:
        if name in steps:
            columns[name] = _area(corners, steps[name].astype(np.float64), edges)
    return columns


def _area(
    corners: NDArray[np.float64], per_step: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Query: [bins] what falls into each bin of a quantity that grows by ``per_step`` over each step."""
    after = np.cumsum(per_step)
    before = np.concatenate(([0.0], after[:-1]))
    grown = np.stack((before, after), axis=1).ravel()
    # A step that takes no time makes two corners at one instant: the later one holds from there on.
    at_edges = np.interp(edges, corners, grown, left=0.0)
    at_edges[-1] = grown[-1]
    return np.diff(at_edges)


def _in_system(result: RunResult, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Query: [bins] requests that had arrived and not yet left, averaged over each bin."""
    arrival, leaving = (column.astype(np.float64) for column in in_system(result))
    since_arrival = _request_time_before(np.sort(arrival), edges)
    since_leaving = _request_time_before(np.sort(leaving), edges)
    mean: NDArray[np.float64] = np.diff(since_arrival - since_leaving) / np.diff(edges)
    return mean


def _request_time_before(instants: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Query: [edges] the sum over sorted ``instants`` before an edge of the time since them."""
    count = np.searchsorted(instants, edges)
    total = np.concatenate(([0.0], np.cumsum(instants)))
    area: NDArray[np.float64] = edges * count - total[count]
    return area
