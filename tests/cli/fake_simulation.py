"""Stands in for the simulation in tests of the commands around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from synthetic_run import synthetic_run

from hisparsim.results import RunResult


def fake_simulate(
    scenario: Any, trace: Any, *, check: bool = False, progress: Callable[[int], None] | None = None
) -> RunResult:
    """The toy server's run under the scenario's policy, as many requests as the trace has."""
    result = synthetic_run(scenario.policy.name, num_requests=min(trace.num_requests, 60), seed=scenario.seed)
    if progress is not None:
        progress(result.num_requests)
    return replace(result, summary={**result.summary, "checked": check})


def square(value: int, report: Callable[[int], None]) -> int:
    """A function that other processes can import; reports its own value."""
    report(value)
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value * value


def nap(duration_s: float, report: Callable[[int], None]) -> None:
    """Sleeps, after reporting that it began."""
    report(1)
    time.sleep(duration_s)


def leave(item: int, report: Callable[[int], None]) -> int:
    """Ends the process at once, as a kernel that is short of memory does."""
    os._exit(9)
