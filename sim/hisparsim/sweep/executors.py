"""Executors: where tasks run. All give the same outcomes, in whatever order they finish.

A worker that dies takes only its own task with it: the task is tried again by itself, and a second death is
its outcome (:attr:`Outcome.lost`), not the end of the sweep.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from typing import Protocol, TypeAlias

from hisparsim.workers import end_pool, interrupts_held

from .columns import Cell
from .shelf import Shelf
from .task import Task, run_task

POLL_S = 0.2
MAX_DEATHS = 2
"""Deaths of a worker on one task before the task is given up."""


@dataclass(frozen=True)
class Outcome:
    """How a task ended: with a record, or lost with its worker."""

    task: Task
    record: dict[str, Cell] | None
    lost: str | None = None


class Executor(Protocol):
    """Runs tasks. A context manager: leaving it ends its workers at once."""

    @property
    def num_workers(self) -> int:
        """Tasks at work at a time."""
        ...

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Query: one outcome a task, as they finish."""
        ...

    def close(self) -> None:
        """Change: end the workers, those at work included."""
        ...


class InProcess:
    """Everything in this process, one task after another."""

    num_workers = 1

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Query: one outcome a task, in their order."""
        for task in tasks:
            yield Outcome(task, run_task(task, self._shelf[task.trace_key]))

    def close(self) -> None:
        """Change: nothing; there are no workers."""


_Waiting: TypeAlias = dict[Future[dict[str, Cell]], Task]


class Processes:
    """A pool of worker processes that map the traces; each is started fresh (``spawn``)."""

    def __init__(self, shelf: Shelf, num_workers: int) -> None:
        self._shelf = shelf
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Query: one outcome a task, as they finish."""
        suspects: deque[Task] = deque()
        deaths: dict[str, int] = {}
        yield from self._through(deque(tasks), self.num_workers, suspects)
        while suspects:  # one at a time: whoever dies now did it alone
            task = suspects.popleft()
            deaths[task.fingerprint] = deaths.get(task.fingerprint, 0) + 1
            died: deque[Task] = deque()
            yield from self._through(deque([task]), 1, died)
            if died and deaths[task.fingerprint] < MAX_DEATHS:
                suspects.appendleft(task)
            elif died:
                yield Outcome(task, None, "its worker process died twice (out of memory, or killed)")

    def close(self) -> None:
        """Change: end the workers, those at work included."""
        pool, self._pool = self._pool, None
        if pool is not None:
            end_pool(pool)

    def _through(self, queue: deque[Task], window: int, suspects: deque[Task]) -> Iterator[Outcome]:
        """Query: outcomes with at most ``window`` tasks at work; those of dead workers go to ``suspects``."""
        waiting: _Waiting = {}
        while queue or waiting:
            while queue and len(waiting) < window:
                task = queue.popleft()
                try:
                    waiting[self._submit(task)] = task
                except BrokenProcessPool:  # a worker died between two tasks, which harmed neither
                    self.close()
                    queue.appendleft(task)
            finished, _ = wait(waiting, POLL_S, FIRST_COMPLETED)
            broken = False
            for future in finished:
                task = waiting.pop(future)
                try:
                    record = future.result()
                except BrokenProcessPool:
                    suspects.append(task)
                    broken = True
                    continue
                yield Outcome(task, record)
            if broken:
                suspects.extend(waiting.values())
                waiting.clear()
                self.close()

    def _submit(self, task: Task) -> Future[dict[str, Cell]]:
        with interrupts_held():
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.num_workers, context, _start_worker, (self._shelf,))
            return self._pool.submit(_work, task)


_shelf: Shelf | None = None
"""In a worker: the traces."""


def _start_worker(shelf: Shelf) -> None:
    """Change: keep the traces; leave when the parent is gone, however it went."""
    global _shelf
    _shelf = shelf
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def follow() -> None:
        wait_for([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(task: Task) -> dict[str, Cell]:
    assert _shelf is not None
    return run_task(task, _shelf[task.trace_key])
