"""Whether a run reached a steady state: did the system keep up with its arrivals, for long enough to tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .records import SERVED, RequestStatus, RunResult

MIN_TURNOVERS = 3.0
"""Arrivals must span this many median end-to-end latencies before a run can be called steady."""
GROWTH = 1.25
"""The last third may hold this many times the requests of the middle third (and one request more)."""


class SteadyVerdict(Enum):
    STEADY = "steady"
    """Requests in the system stopped growing while arrivals went on."""
    GROWING = "growing"
    """Requests in the system still grew when the arrivals ended: the latencies depend on the run's length."""
    TOO_SHORT = "too short"
    """The arrivals span too little time to tell."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The verdict and the sentence that explains it."""

    verdict: SteadyVerdict
    reason: str


def judge_steady_state(result: RunResult, from_ns: int = 0) -> SteadyState:
    """Query: compare the requests in the system over the middle and the last third of the arrivals.

    Arrivals before ``from_ns`` are left out, and the system's emptying after the last arrival.
    """
    requests = result.requests
    counted = requests["arrival_ns"] >= 0
    counted &= ~result.has_status(RequestStatus.REJECTED, RequestStatus.SKIPPED)
    arrival = np.sort(requests["arrival_ns"][counted])
    arrival = arrival[arrival >= from_ns]
    served = result.has_status(*SERVED)
    if len(arrival) < 2 or not served.any():
        return SteadyState(SteadyVerdict.TOO_SHORT, "fewer than two requests arrived, or none finished")
    latency_s = float(np.median((requests["finish_ns"] - requests["arrival_ns"])[served])) / 1e9
    start, end = int(arrival[0]), int(arrival[-1])
    span_s = (end - start) / 1e9
    cuts = np.linspace(start, end, 4)
    all_arrivals = requests["arrival_ns"][counted]
    finish = requests["finish_ns"][counted]
    middle = _mean_in_system(all_arrivals, finish, cuts[1], cuts[2])
    last = _mean_in_system(all_arrivals, finish, cuts[2], cuts[3])
    held = (
        f"{middle:.1f} requests in the system over the middle third of the arrivals, "
        f"{last:.1f} over the last third"
    )
    if last > GROWTH * middle + 1.0:
        return SteadyState(SteadyVerdict.GROWING, held)
    if span_s < MIN_TURNOVERS * latency_s:
        short = f"arrivals span {span_s:.1f} s, a request takes {latency_s:.1f} s"
        return SteadyState(SteadyVerdict.TOO_SHORT, short)
    return SteadyState(SteadyVerdict.STEADY, held)


def _mean_in_system(arrival: NDArray[np.int64], finish: NDArray[np.int64], start: float, end: float) -> float:
    """Query: requests in the system averaged over [start, end); finish -1 = still there."""
    if end <= start:
        return 0.0
    leaving = np.where(finish < 0, end, finish)
    overlap = np.minimum(leaving, end) - np.maximum(arrival, start)
    return float(np.maximum(overlap, 0).sum() / (end - start))
