"""How long a sweep will take, from a few short runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .plan import Plan
from .task import Task, run_task

SAMPLE_REQUESTS = 200
MAX_SAMPLES = 4


@dataclass(frozen=True)
class Estimate:
    """Counts of a sweep, and seconds by a rule of three over the requests."""

    num_scenarios: int
    num_runs: int
    """Distinct ones."""
    num_impossible: int
    first_error: str | None
    seconds: float


def estimate(plan: Plan, jobs: int) -> Estimate:
    """Query: the size of a sweep; runs one scenario of each policy (four at most) on a short prefix."""
    tasks = plan.tasks()
    sampled: dict[str, Task] = {}
    for task in tasks:
        sampled.setdefault(task.scenario.policy.name, task)
    spent: dict[str, float] = {}
    for policy, task in list(sampled.items())[:MAX_SAMPLES]:
        trace = plan.traces[task.trace_key]
        total = min(trace.num_requests, task.scenario.workload.limit or trace.num_requests)
        prefix = min(total, SAMPLE_REQUESTS)
        started = time.perf_counter()
        short = task.scenario.with_overrides([f"workload.limit={prefix}"])
        run_task(Task(task.fingerprint, short, task.trace_key), trace)
        spent[policy] = (time.perf_counter() - started) * total / prefix
    usual = sum(spent.values()) / max(len(spent), 1)
    seconds = sum(spent.get(task.scenario.policy.name, usual) for task in tasks)
    errors = [planned.error for planned in plan.planned if planned.error is not None]
    return Estimate(
        len(plan.planned), len(tasks), len(errors), errors[0] if errors else None, seconds / max(jobs, 1)
    )
