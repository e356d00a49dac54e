"""Run a logged workload in lockstep and compare every column that the log has, step by step."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hisparsim.conform.workload import LoggedWorkload
from hisparsim.serving.core import ServingCore, StepNotes
from hisparsim.serving.lockstep import LockstepStep, lockstep
from hisparsim.serving.plan import Action
from hisparsim.serving.policies import policy_class
from hisparsim.serving.request import Request

CUMULATIVE = ("preemptions", "finished", "prefix_hit_tokens", "pages_adopted_cum")


@dataclass(frozen=True, slots=True)
class Difference:
    step: int
    column: str
    expected: int
    actual: int
    expected_row: dict[str, int]
    actual_row: dict[str, int]
    decisions: tuple[str, ...]
    """The core's last actions before the difference, newest last."""


@dataclass(slots=True)
class Conformance:
    """The verdict on one workload."""

    name: str
    policy: str
    num_steps: int
    num_equal_steps: int = 0
    num_own_steps: int = 0
    first_difference: Difference | None = None
    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Total -> (logged, own)."""
    wall_s: float = 0.0

    @property
    def conforms(self) -> bool:
        return self.num_equal_steps == self.num_steps == self.num_own_steps


def run_conformance(log: LoggedWorkload, *, check: bool = False) -> Conformance:
    """Drive the core through a workload and compare.

    Raises:
        LawBroken: with ``check``, where a conservation law does not hold.
    """
    limits = log.limits
    policy = policy_class(log.policy)(limits)
    core = ServingCore(limits, policy)
    verdict = Conformance(log.name, log.policy, len(log.rows))
    recent: deque[Action] = deque(maxlen=12)
    own_rows: list[dict[str, int]] = []
    started = time.perf_counter()
    steps = lockstep(
        core, log.users(), log.lags, accepted=_acceptance(log), check=check, max_steps=len(log.rows) + 1
    )
    for step in steps:
        row = log_row(core, step)
        own_rows.append(row)
        recent.extend(getattr(step.plan, "actions", ()))
        if step.index >= len(log.rows):
            continue
        logged = dict(zip(log.columns, log.rows[step.index], strict=True))
        unequal = [column for column, value in logged.items() if column in row and row[column] != value]
        if not unequal:
            verdict.num_equal_steps += 1
        elif verdict.first_difference is None:
            column = unequal[0]
            verdict.first_difference = Difference(
                step.index, column, logged[column], row[column], logged, row, tuple(map(_describe, recent))
            )
    verdict.wall_s = time.perf_counter() - started
    verdict.num_own_steps = len(own_rows)
    verdict.totals = _totals(log, own_rows)
    return verdict


def log_row(core: ServingCore, step: LockstepStep) -> dict[str, int]:
    """One row of the log format, the state right after a plan. Changes nothing."""
    census, notes = step.census, core.notes
    return {
        "step": step.index,
        "running": len(core.running),
        "waiting": len(core.waiting),
        "sched_prefill_tokens": notes.prefill_tokens,
        "sched_decode_tokens": notes.decode_tokens,
        "sched_reqs": len(notes.scheduled) + len(notes.steady),
        "preemptions": core.num_preemptions,
        "free_gpu_blocks": census.free,
        "pinned_blocks": census.resident_pinned + census.hot + census.index + census.orphans,
        "resident_pinned": census.resident_pinned,
        "resident_unpinned_readable": census.resident_released,
        "hot_blocks": census.hot,
        "indexer_blocks": census.index,
        "host_used": census.host_used,
        "n_full": census.num_full,
        "n_mixed": census.num_mixed,
        "n_none": census.num_none,
        "n_hot": census.num_hot,
        "pages_lost": census.pages_lost,
        "pending_spills": census.pending_transfers,
        "unpinned_free_total": census.watched_free,
        "stall_break": int(notes.waited),
        "finished": step.finished,
        "prefix_hit_tokens": core.prefix_hit_tokens,
        "all_resident_flag": _all_resident(notes),
        "pages_adopted_cum": census.pages_adopted,
        "victim_inflight": int(notes.victim_in_flight),
        "orphan_pinned": census.orphans,
    }


def _all_resident(notes: StepNotes) -> int:
    return int(all(_readable(request) for request in (*notes.scheduled, *notes.steady)))


def _readable(request: Request) -> bool:
    ledger = request.ledger
    return ledger is not None and ledger.num_readable == ledger.num_pages


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


def _totals(log: LoggedWorkload, own: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    logged = [dict(zip(log.columns, row, strict=True)) for row in log.rows]
    totals: dict[str, tuple[int, int]] = {"steps": (len(logged), len(own))}
    for column in log.columns[1:]:
        if not own or column not in own[0]:
            continue
        if column in CUMULATIVE:
            totals[column] = (logged[-1][column], own[-1][column])
        else:
            totals[column] = (sum(r[column] for r in logged), sum(r[column] for r in own))
    return totals


def _describe(action: Action) -> str:
    fields = []
    for name in action.__slots__:
        value = getattr(action, name)
        size = getattr(value, "size", None)
        fields.append(f"{name}={value}" if size is None or size <= 4 else f"{name}=[{size}]")
    return f"{type(action).__name__}({', '.join(fields)})"
