"""Run a logged workload in lockstep and compare every column that the log has, step by step."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from hisparsim.conform.rows import log_row
from hisparsim.conform.totals import RunTotals
from hisparsim.conform.workload import LoggedWorkload
from hisparsim.serving.core import ServingCore
from hisparsim.serving.lockstep import lockstep
from hisparsim.serving.plan import Action
from hisparsim.serving.policies import policy_class
from hisparsim.serving.progress import Wedged
from hisparsim.serving.request import Request

NUM_RECENT = 12
"""Decisions shown before a difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step in which log and core disagree."""

    step: int
    column: str
    """The first unequal column; ``step`` where one side has no such step at all."""
    expected: int | None
    """The log's value, None where the log has ended."""
    actual: int | None
    """The core's value, None where the core has ended."""
    expected_row: dict[str, int]
    actual_row: dict[str, int]
    logged_decisions: tuple[str, ...]
    """What the log says was decided last (admissions, preemptions, finishes), newest last."""
    own_decisions: tuple[str, ...]
    """The core's last actions, newest last."""

    @property
    def unequal_columns(self) -> list[str]:
        return [column for column, value in self.expected_row.items() if self.actual_row.get(column) != value]


@dataclass(slots=True)
class Conformance:
    """The verdict on one workload."""

    name: str
    policy: str
    num_steps: int
    """Rows of the log."""
    num_equal_steps: int = 0
    first_difference: Difference | None = None
    totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Total -> (logged, own), those that the log names."""
    unknown_columns: tuple[str, ...] = ()
    """Columns of the log that nothing here corresponds to."""
    is_complete: bool = True
    """False where the log was cut short: then nothing is said about what would follow."""
    wall_s: float = 0.0

    @property
    def conforms(self) -> bool:
        return self.first_difference is None


def run_conformance(log: LoggedWorkload, *, check: bool = False) -> Conformance:
    """Drive the core through a workload and compare.

    Raises:
        LawBroken: with ``check``, where a conservation law does not hold.
    """
    limits = log.limits
    core = ServingCore(limits, policy_class(log.policy)(limits, **log.policy_options))
    verdict = Conformance(log.name, log.policy, len(log.rows), is_complete=log.is_complete)
    recent: deque[tuple[int, Action]] = deque(maxlen=NUM_RECENT)
    totals = RunTotals()
    num_own_steps = 0
    started = time.perf_counter()
    steps = lockstep(
        core,
        log.users(),
        log.lags,
        accepted=_acceptance(log),
        on_complete=totals.add_completion,
        check=check,
        max_steps=len(log.rows) + log.is_complete,
    )
    ended: tuple[str, ...] = ()
    while True:
        try:
            step = next(steps)
        except StopIteration:
            break
        except Wedged as wedged:  # the core gave a request up that the engine went on trying
            ended = (str(wedged),)
            break
        row = log_row(core, step)
        totals.add_step(step, row)
        recent.extend((step.index, action) for action in getattr(step.plan, "actions", ()))
        num_own_steps += 1
        logged = log.row(step.index) if step.index < len(log.rows) else {}
        unequal = [column for column, value in logged.items() if row.get(column, value) != value]
        verdict.num_equal_steps += bool(logged) and not unequal
        if verdict.first_difference is None and (unequal or not logged):
            column = unequal[0] if unequal else "step"
            verdict.first_difference = Difference(
                step.index,
                column,
                logged.get(column),
                row[column],
                logged,
                row,
                _logged_decisions(log, step.index),
                tuple(_describe(index, action) for index, action in recent),
            )
        if step.index == 0:
            verdict.unknown_columns = tuple(column for column in log.columns if column not in row)
    verdict.wall_s = time.perf_counter() - started
    if num_own_steps < len(log.rows) and verdict.first_difference is None:
        last = tuple(_describe(index, action) for index, action in recent) + ended
        verdict.first_difference = Difference(
            num_own_steps,
            "step",
            num_own_steps,
            None,
            log.row(num_own_steps),
            {},
            _logged_decisions(log, num_own_steps),
            last,
        )
    verdict.totals = totals.beside(log.totals)
    return verdict


def _acceptance(log: LoggedWorkload) -> Callable[[Request, int], int] | None:
    """Accepted drafts by the log's pattern: each request walks through it, one entry a verifying step."""
    drafts = log.workload.get("mtp") or 0
    if not drafts:
        return None
    pattern: list[int] = log.workload.get("accept") or [drafts]
    steps: Counter[int] = Counter()

    def accepted(request: Request, num_drafts: int) -> int:
        step = steps[request.request_id]
        steps[request.request_id] += 1
        return min(pattern[step % len(pattern)], num_drafts)

    return accepted


def _logged_decisions(log: LoggedWorkload, step: int) -> tuple[str, ...]:
    events: list[tuple[int, str]] = []
    for request_id, prompt, admitted, hit, finished, *_ in log.requests:
        if admitted is not None and admitted <= step:
            events.append((admitted, f"admit {request_id} ({prompt:,} prompt tokens, {hit:,} found)"))
        if finished is not None and finished <= step:
            events.append((finished, f"finish {request_id}"))
    for at, request_id, computed, known, free_gpu, _ in log.preemptions:
        if at <= step:
            events.append(
                (at, f"preempt {request_id} ({computed:,} of {known:,} computed, {free_gpu:,} blocks free)")
            )
    events.sort(key=lambda event: event[0])
    return tuple(f"step {at}: {what}" for at, what in events[-NUM_RECENT:])


def _describe(step: int, action: Action) -> str:
    told = []
    for name in [each.name for each in fields(action)]:
        value = getattr(action, name)
        size = getattr(value, "size", None)
        told.append(f"{name}={value}" if size is None or size <= 4 else f"{name}=[{size}]")
    return f"step {step}: {type(action).__name__}({', '.join(told)})"
