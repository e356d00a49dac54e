"""Runs the tasks of a sweep: each once, whatever finished before is not run again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from .columns import Cell, failed_record
from .errors import SweepError
from .executors import Executor, InProcess, Processes
from .shelf import Shelf
from .store import SweepStore
from .task import Task

Record: TypeAlias = dict[str, Cell]
OnDone: TypeAlias = Callable[[Task, Record], None]


class ExecutorKind(Enum):
    """Where tasks run."""

    PROCESSES = "processes"
    RAY = "ray"


@dataclass(frozen=True)
class Execution:
    """How to run: the kind of executor, how many workers, and the cluster's address."""

    kind: ExecutorKind = ExecutorKind.PROCESSES
    jobs: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        if self.address is not None and self.kind is not ExecutorKind.RAY:
            raise SweepError(f"--address {self.address}: only --executor ray has one")

    def executor(self, shelf: Shelf) -> Executor:
        """Change: start what runs the tasks."""
        if self.kind is ExecutorKind.RAY:
            from .ray_executor import RayCluster

            return RayCluster(shelf, self.address, self.jobs)
        return InProcess(shelf) if self.jobs == 1 else Processes(shelf, self.jobs)


class Runner:
    """Finished runs by fingerprint, and the means to make more."""

    def __init__(self, executor: Executor, store: SweepStore | None, on_done: OnDone | None = None) -> None:
        self.executor = executor
        self.store = store
        self.records: dict[str, Record] = {} if store is None else store.finished()
        self.num_made = 0
        """Runs that this process made itself."""
        self._on_done = on_done

    def run(self, tasks: Sequence[Task]) -> None:
        """Change: make the runs among ``tasks`` that are not there yet; each is stored as it finishes.

        A run whose worker was lost twice is a failed record, and is made again by ``--resume``.
        """
        missing = {task.fingerprint: task for task in tasks if task.fingerprint not in self.records}
        for outcome in self.executor.outcomes(list(missing.values())):
            if outcome.record is None:
                record = failed_record(outcome.lost or "lost")
            else:
                record = outcome.record
                if self.store is not None:
                    self.store.add(outcome.task.fingerprint, record)
            self.records[outcome.task.fingerprint] = record
            self.num_made += 1
            if self._on_done is not None:
                self._on_done(outcome.task, record)

    def record(self, task: Task) -> Record:
        """Query: the record of a task that was run."""
        return self.records[task.fingerprint]


@contextmanager
def running(
    make_shelf: Callable[[Path], Shelf],
    execution: Execution,
    store: SweepStore | None = None,
    on_done: OnDone | None = None,
) -> Iterator[Runner]:
    """Change: a runner for the block; its workers and stored traces are gone when it ends."""
    with ExitStack() as stack:
        if store is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hisparsim-")))
        else:
            place = store.path / ".traces"
            stack.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            shelf = make_shelf(place)
        except OSError as error:
            raise SweepError(f"{place}: {error.strerror or error}") from None
        executor = execution.executor(shelf)
        stack.callback(executor.close)
        yield Runner(executor, store, on_done)
