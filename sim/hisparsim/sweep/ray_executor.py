"""Execution on a Ray cluster: the traces lie in Ray's object store, tasks go wherever there is a free core.

Needs the extra ``[ray]``; every node needs this version of hisparsim, and the file of a policy that is given
as ``path/to/file.py:Class`` at the same path.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from hisparsim_traces import Trace

from .columns import Cell
from .errors import MissingLibraryError, SweepError
from .executors import MAX_DEATHS, Outcome
from .shelf import Shelf
from .task import Task, run_task

CONNECT_S = 5.0
QUEUE_DEPTH = 2
"""Tasks handed to the cluster for each of its cores; the rest wait here."""


class RayCluster:
    """The cores of a Ray cluster.

    Raises:
        MissingLibraryError: ray is not installed.
        SweepError: there is no cluster at the address.
    """

    def __init__(self, shelf: Shelf, address: str | None = None, num_workers: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingLibraryError("--executor ray needs ray: pip install 'hisparsim[ray]'") from None
        self._ray: Any = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            _require_answer(address)
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            if address is None:
                options |= {"num_cpus": num_workers, "include_dashboard": False}
            try:
                ray.init(address=address, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise SweepError(
                    f"--address {address}: no Ray cluster answers ({' '.join(str(error).split())[:200]})"
                ) from None
        self._shelf = shelf
        self._traces: dict[str, Any] = {}
        self._function: Any = ray.remote(_work).options(num_cpus=1, max_retries=MAX_DEATHS)
        self._waiting: dict[Any, Task] = {}

    @property
    def num_workers(self) -> int:
        """Cores of the cluster at this moment."""
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def outcomes(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Query: one outcome a task, as they finish. Ray runs tasks of a dead worker or node again."""
        ray, left = self._ray, list(reversed(tasks))
        while left or self._waiting:
            while left and len(self._waiting) < QUEUE_DEPTH * self.num_workers:
                task = left.pop()
                self._waiting[self._function.remote(task, self._trace(task.trace_key))] = task
            finished, _ = ray.wait(list(self._waiting), num_returns=1)
            for reference in finished:
                task = self._waiting.pop(reference)
                try:
                    record = ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Outcome(task, None, f"its Ray worker was lost ({type(error).__name__})")
                    continue
                yield Outcome(task, record)

    def close(self) -> None:
        """Change: cancel what is at work, and leave the cluster (a local one that was started here ends)."""
        for reference in self._waiting:
            self._ray.cancel(reference, force=True)
        self._waiting.clear()
        if self._owns:
            self._ray.shutdown()

    def _trace(self, key: str) -> Any:
        if key not in self._traces:
            self._traces[key] = self._ray.put(self._shelf[key])
        return self._traces[key]


def _require_answer(address: str | None) -> None:
    """Query: raise SweepError where nothing listens at HOST:PORT; ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise SweepError(f"--address {address}: no Ray cluster answers ({error.strerror or error})") from None


def _work(task: Task, trace: Trace) -> dict[str, Cell]:
    """Query: as run_task; Ray finds it by its module on every node."""
    return run_task(task, trace)
