"""Copies of whole pages that outlive the step that starts them, beside compute.

On a CPU one thread makes them in the order in which they were asked for; on a GPU they go to a stream of
their own behind what the compute stream has been given so far, and events tell when they are done. ``inline``
makes each copy at once, for ranks that only follow and for runs without time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from .devices import Device

Copy = Callable[[], int]
"""Moves the bytes of one transfer and returns how many."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A transfer that is complete."""

    transfer_id: int
    request_id: int | None
    """The request that waits for it, for loads."""
    at_ns: int
    """By ``time.perf_counter_ns``."""


class CopyEngine:
    """Starts copies and tells which are complete."""

    def __init__(self, device: Device, *, inline: bool) -> None:
        self._inline = inline
        self._landed: deque[Landed] = deque()
        self._worker = None if inline or device.is_cuda else ThreadPoolExecutor(1, "copies")
        self._futures: dict[int, Future[None]] = {}
        self._stream = torch.cuda.Stream() if device.is_cuda and not inline else None  # type: ignore[no-untyped-call]
        self._events: deque[tuple[int, int | None, torch.cuda.Event]] = deque()

    def start(self, transfer_id: int, request_id: int | None, copy: Copy) -> None:
        """Change: begin a transfer."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                copy()
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
            self._events.append((transfer_id, request_id, event))
        elif self._worker is not None:
            self._futures[transfer_id] = self._worker.submit(self._run, transfer_id, request_id, copy)
        else:
            self._run(transfer_id, request_id, copy)

    def _run(self, transfer_id: int, request_id: int | None, copy: Copy) -> None:
        copy()
        self._landed.append(Landed(transfer_id, request_id, time.perf_counter_ns()))

    def landed(self) -> list[Landed]:
        """Change: the transfers that have been completed since the last call, in their order.

        Raises:
            Exception: whatever a copy raised.
        """
        for transfer_id, future in list(self._futures.items()):
            if future.done():
                future.result()
                del self._futures[transfer_id]
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            transfer_id, request_id, _ = self._events.popleft()
            self._landed.append(Landed(transfer_id, request_id, time.perf_counter_ns()))
        done = []
        while self._landed:
            done.append(self._landed.popleft())
        return done

    def drain(self) -> None:
        """Change: wait until everything that was started is complete."""
        for future in self._futures.values():
            future.result()
        for _, _, event in self._events:
            event.synchronize()

    def close(self) -> None:
        """Change: finish what was started and let the thread go."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
