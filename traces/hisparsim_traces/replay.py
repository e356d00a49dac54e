"""How a trace is played back: which part, how fast, open or closed loop.

Whoever replays a trace starts a row without a parent at its arrival. A row with a parent starts `think_s`
after its parent's end; where think_s is unknown (NaN), at its arrival, but not before its parent's end.

The order of operations is fixed: window, limit, loop, gap cap, time scale. So a gap cap is in the trace's
own seconds, and a time scale of 0.1 makes a 60 s cap 6 s long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from .errors import TraceError
from .selecting import reordered, select_rows
from .trace import Floats, Trace

Loop = Literal["think", "gaps", "service", "open"]


def prepare(
    trace: Trace,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    limit: int | None = None,
    loop: Loop = "think",
    service_scale: float = 1.0,
    gap_cap_s: float | None = None,
    time_scale: float = 1.0,
) -> Trace:
    """A trace ready for replay.

    Args:
        start_s, end_s: keep rows that arrive in [start_s, end_s); rows without a stamp go with their
            ancestor.
        limit: keep the first rows.
        loop: "think": a turn comes think_s after its parent's end. "gaps": at its original stamp, never
            before its parent's end. "service": at stamps rebuilt with every recorded service time
            multiplied by `service_scale` and every think time kept, so service is counted once. "open": at
            its original stamp, whether or not its parent has ended.
        service_scale: for loop "service": how much slower (2.0) or faster (0.5) than recorded.
        gap_cap_s: no think time, and no pause between arrivals of the whole trace, is longer.
        time_scale: multiplies arrivals and think times; 0.5 doubles the rate.

    Raises:
        TraceError: a bad argument, an empty window, or rows without the stamps that the loop needs.
    """
    if end_s is not None or start_s:
        trace = window(trace, start_s, end_s)
    if limit is not None:
        if limit < 1:
            raise TraceError(f"limit {limit}: must be at least 1 request")
        trace = trace.head(limit)
    trace = with_loop(trace, loop, service_scale)
    if gap_cap_s is not None:
        trace = cap_gaps(trace, gap_cap_s)
    return trace if time_scale == 1.0 else trace.scaled(time_scale)


def own_or_ancestor_arrival(trace: Trace) -> Floats:
    """Each row's arrival, or its nearest ancestor's where it has none. [n]"""
    arrival = trace.arrival_s.copy()
    for row in np.flatnonzero(np.isnan(arrival)).tolist():  # parents stand earlier
        arrival[row] = arrival[trace.parent[row]]
    return arrival


def window(trace: Trace, start_s: float, end_s: float | None = None) -> Trace:
    """The rows that arrive in [start_s, end_s), at new times from the first kept."""
    arrival = own_or_ancestor_arrival(trace)
    keep = arrival >= start_s
    if end_s is not None:
        keep &= arrival < end_s
    if not keep.any():
        until = "the end" if end_s is None else f"{end_s:g} s"
        last = float(arrival.max()) if len(arrival) else 0.0
        raise TraceError(f"no request arrives from {start_s:g} s to {until}; the last arrives at {last:g} s")
    return select_rows(trace, keep)


def with_loop(trace: Trace, loop: Loop, service_scale: float = 1.0) -> Trace:
    """The trace with its turns' starts told in one way; see `prepare`."""
    if loop == "think":
        return trace
    if loop not in ("gaps", "service", "open"):
        raise TraceError(f"loop {loop!r}: one of think, gaps, service, open")
    unstamped = int(np.isnan(trace.arrival_s).sum())
    if unstamped:
        raise TraceError(
            f"loop {loop!r} needs original stamps, and {unstamped} turns have none: use loop 'think'"
        )
    n = trace.num_requests
    unknown = np.full(n, np.nan)
    if loop == "gaps":
        return replace(trace, think_s=unknown)
    if loop == "open":
        return replace(
            trace,
            think_s=unknown,
            parent=np.full(n, -1, np.int64),
            shared_prefix_tokens=np.zeros(n, np.int64),
        )
    if not (service_scale >= 0 and np.isfinite(service_scale)):
        raise TraceError(f"service_scale {service_scale}: must be finite and not negative")
    arrival = trace.arrival_s.copy()
    for row in np.flatnonzero(trace.parent >= 0).tolist():
        parent = int(trace.parent[row])
        gap = float(trace.arrival_s[row] - trace.arrival_s[parent])
        think = float(trace.think_s[row])
        service = 0.0 if np.isnan(think) else max(gap - think, 0.0)
        arrival[row] = arrival[parent] + (gap - service) + service * service_scale
    order = np.argsort(arrival, kind="stable")
    return reordered(replace(trace, arrival_s=arrival, think_s=unknown), order)


def cap_gaps(trace: Trace, gap_cap_s: float) -> Trace:
    """Think times, and pauses between consecutive arrivals, cut to `gap_cap_s` of the trace's own time."""
    if not gap_cap_s > 0:
        raise TraceError(f"gap_cap_s {gap_cap_s}: must be above 0 seconds")
    known = np.flatnonzero(~np.isnan(trace.arrival_s))
    order = known[np.argsort(trace.arrival_s[known], kind="stable")]
    arrival = trace.arrival_s.copy()
    gaps = np.diff(trace.arrival_s[order], prepend=0.0)
    arrival[order] = trace.arrival_s[order] - np.cumsum(np.maximum(gaps - gap_cap_s, 0.0))
    return replace(trace, arrival_s=arrival, think_s=np.minimum(trace.think_s, gap_cap_s))


def spread_ties(trace: Trace, tick_s: float) -> Trace:
    """Arrivals that share a coarse stamp, spread evenly over the tick (or until the next stamp, if sooner).

    For sources that stamp in ticks, as Mooncake does every 3 s. The order stays; dependent rows are left
    alone.
    """
    if not (tick_s > 0 and np.isfinite(tick_s)):
        raise TraceError(f"tick_s {tick_s}: must be a finite number of seconds above 0")
    roots = np.flatnonzero(trace.parent < 0)
    stamps, first, counts = np.unique(trace.arrival_s[roots], return_index=True, return_counts=True)
    if not len(stamps):
        return trace
    width = np.minimum(np.append(np.diff(stamps), tick_s), tick_s)
    within = np.arange(len(roots)) - np.repeat(first, counts)
    arrival = trace.arrival_s.copy()
    arrival[roots] += within * np.repeat(width / counts, counts)
    return replace(trace, arrival_s=arrival)
