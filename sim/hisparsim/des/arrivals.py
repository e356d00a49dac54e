"""Arrivals: when each request of a trace reaches the engine, and what becomes of those that cannot.

Open loop: requests arrive at their stamps (scaled, or redrawn as a Poisson process); a turn with a parent
arrives when its parent has finished and its think time has passed. Closed loop: so many users, each with one
conversation (or single request) at a time, the next one as soon as the last is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hisparsim.results.records import RequestStatus
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.sections import OverLength
from hisparsim_traces import Trace

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class ArrivalCounts:
    rejected: int = 0
    skipped: int = 0
    truncated: int = 0
    tokens_truncated: int = 0
    first_rejection: str | None = None


@dataclass(slots=True)
class Arrivals:
    """The calendar of arrivals. ``prompt_tokens`` may be shorter than the trace's where it was truncated."""

    trace: Trace
    prompt_tokens: list[int]
    output_tokens: list[int]
    status: list[RequestStatus]
    arrival_ns: list[int]
    counts: ArrivalCounts
    _calendar: list[tuple[int, int]] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)
    _backlog: list[int] = field(default_factory=list)
    _open_turns: dict[int, int] = field(default_factory=dict)
    _closed_loop: bool = False
    _front_end: Callable[[int], int] | None = None
    _front_end_free_ns: int = 0
    _ready: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls, trace: Trace, scenario: Scenario, front_end_ns: Callable[[int], int] | None = None
    ) -> Arrivals:
        """The calendar of a trace (already scaled and limited) under a scenario's workload rules.

        ``front_end_ns`` gives the time of the serial front end for a prompt of so many tokens; without it
        requests reach the queue as they arrive.
        """
        num = trace.num_requests
        arrivals = cls(
            trace,
            trace.input_tokens.tolist(),
            trace.output_tokens.tolist(),
            [RequestStatus.UNFINISHED] * num,
            [-1] * num,
            ArrivalCounts(),
            _front_end=front_end_ns,
        )
        parents = trace.parent.tolist()
        for row, parent in enumerate(parents):
            if parent >= 0:
                arrivals._children.setdefault(parent, []).append(row)
        arrivals._apply_window(scenario.scheduler.max_model_len, scenario.workload.over_length)
        roots = [row for row in range(num) if parents[row] < 0]
        concurrency = scenario.workload.concurrency
        if concurrency is not None:
            arrivals._closed_loop = True
            arrivals._backlog = roots[::-1]
            for _ in range(min(concurrency, len(roots))):
                arrivals._start_user(0)
            return arrivals
        stamps = np.nan_to_num(trace.arrival_s, nan=0.0)
        if scenario.workload.rate_per_s is not None:
            rng = np.random.default_rng([scenario.seed, 0x617272])
            gaps = rng.exponential(1.0 / scenario.workload.rate_per_s, len(roots))
            gaps[:1] = 0.0
            stamps[roots] = np.cumsum(gaps)
        times = np.rint(stamps * NS_PER_S).astype(np.int64).tolist()
        arrivals._calendar = [(times[row], row) for row in roots]
        heapq.heapify(arrivals._calendar)
        return arrivals

    def _apply_window(self, max_model_len: int, rule: OverLength) -> None:
        for row, (prompt, output) in enumerate(zip(self.prompt_tokens, self.output_tokens, strict=True)):
            excess = prompt + output - max_model_len
            if excess <= 0:
                continue
            if rule is OverLength.TRUNCATE and prompt - excess >= 1:
                self.prompt_tokens[row] = prompt - excess
                self.counts.truncated += 1
                self.counts.tokens_truncated += excess
            elif rule is OverLength.SKIP:
                self.status[row] = RequestStatus.SKIPPED
            else:
                self.status[row] = RequestStatus.REJECTED
                self._note(f"row {row} needs {prompt + output:,} tokens, the window has {max_model_len:,}")

    def _note(self, reason: str) -> None:
        if self.counts.first_rejection is None:
            self.counts.first_rejection = reason

    @property
    def wait_for_others(self) -> bool:
        """Whether requests arrive because others have finished."""
        return self._closed_loop or bool(self._children)

    # -- time passes ------------------------------------------------------------------------------

    def next_ns(self) -> int | None:
        """When the next arrival is due, or None. Changes nothing."""
        calendar, ready = self._calendar, self._ready
        if calendar and ready:
            return min(calendar[0][0], ready[0][0])
        if calendar:
            return calendar[0][0]
        return ready[0][0] if ready else None

    def due(self, now_ns: int) -> list[int]:
        """Rows that have arrived (and passed the front end) by now, in order of arrival then row."""
        rows = self._arrive(now_ns)
        if self._front_end is None:
            return rows
        for row in rows:  # one request after another passes the front end
            start = max(self._front_end_free_ns, self.arrival_ns[row])
            self._front_end_free_ns = start + self._front_end(self.prompt_tokens[row])
            heapq.heappush(self._ready, (self._front_end_free_ns, row))
        passed: list[int] = []
        while self._ready and self._ready[0][0] <= now_ns:
            passed.append(heapq.heappop(self._ready)[1])
        return passed

    def _arrive(self, now_ns: int) -> list[int]:
        rows: list[int] = []
        while self._calendar and self._calendar[0][0] <= now_ns:
            time_ns, row = heapq.heappop(self._calendar)
            self.arrival_ns[row] = time_ns
            if self.status[row] is RequestStatus.UNFINISHED:
                rows.append(row)
            else:
                if self.status[row] is RequestStatus.SKIPPED:
                    self.counts.skipped += 1
                else:
                    self.counts.rejected += 1
                self._follow(row, time_ns)
        return rows

    def refuse(self, row: int, reason: str, now_ns: int) -> None:
        """The engine could never serve this request."""
        self.status[row] = RequestStatus.REJECTED
        self.counts.rejected += 1
        self._note(reason)
        self._follow(row, now_ns)

    def finished(self, row: int, now_ns: int, status: RequestStatus) -> None:
        """A request left; whoever waited for it is put on the calendar."""
        self.status[row] = status
        self._follow(row, now_ns)

    def _follow(self, row: int, now_ns: int) -> None:
        children = self._children.get(row, ())
        for child in children:
            heapq.heappush(self._calendar, (self._start_of(child, now_ns), child))
        if self._closed_loop:
            root = self._open_turns.pop(row)
            for child in children:
                self._open_turns[child] = root
            if root not in self._open_turns.values():
                self._start_user(now_ns)

    def _start_of(self, child: int, parent_end_ns: int) -> int:
        """When a turn starts: its think time after its parent, or as stamped where that is unknown."""
        think_s, stamp_s = float(self.trace.think_s[child]), float(self.trace.arrival_s[child])
        if not np.isnan(think_s):
            return parent_end_ns + max(round(think_s * NS_PER_S), 0)
        if np.isnan(stamp_s) or self._closed_loop:
            return parent_end_ns
        return max(parent_end_ns, round(stamp_s * NS_PER_S))

    def _start_user(self, now_ns: int) -> None:
        if self._backlog:
            row = self._backlog.pop()
            self._open_turns[row] = row
            heapq.heappush(self._calendar, (now_ns, row))
