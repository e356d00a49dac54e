"""One simulation of a sweep, as it travels to a worker, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace

from .columns import Cell, failed_record, record_of
from .identity import host_memory_gib


@dataclass(frozen=True)
class Task:
    """A run to make. Tasks of one fingerprint give one record."""

    fingerprint: str
    scenario: Scenario
    trace_key: str


def run_task(task: Task, trace: Trace) -> dict[str, Cell]:
    """Query: the record of the run; an error that the scenario or its policy causes is a record too."""
    import hisparsim
    from hisparsim.serving.policies.faults import policy_faults

    try:
        with policy_faults(task.scenario.policy.name):
            result = hisparsim.simulate(task.scenario, trace)
    except MemoryError:
        raise
    except Exception as error:  # a user's policy may raise anything: that run fails, the sweep goes on
        return failed_record(one_line(error))
    return record_of(result, host_memory_gib(task.scenario))


def one_line(error: BaseException) -> str:
    """Query: an error as one line; the library's own by its message, others with their type."""
    message = " ".join(str(error).split())
    own = type(error).__module__.split(".")[0].startswith("hisparsim")
    return message if own and message else f"{type(error).__name__}: {message}".rstrip(": ")
