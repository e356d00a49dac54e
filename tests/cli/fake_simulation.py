"""Stands in for the simulation in tests of the commands around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from synthetic_run import synthetic_run

from hisparsim.results import RunResult


def fake_simulate(scenario: Any, trace: Any, *, check: bool = False) -> RunResult:
    """The toy server's run under the scenario's policy, as many requests as the trace has."""
    result = synthetic_run(scenario.policy.name, num_requests=min(trace.num_requests, 60), seed=scenario.seed)
    return replace(result, summary={**result.summary, "checked": check})


def square(value: int) -> int:
    """A function that other processes can import."""
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value * value
