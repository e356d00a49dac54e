"""Tells the core of transfers as they complete, by the rule that the simulator plays.

A worker looks for finished copies when a step starts and reports them with that step's output. Pages whose
rows were mirrored need no bytes of their own: their write-back is reported one step after it was asked for as
enqueued, two steps after as done. While nothing runs, news is told at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hisparsim.serving.plan import Load, Restore, StepPlan, TransferPhase, TransferUpdate, WriteBack

from .copies import CopyEngine, Landed

MIRRORED_LAG = 2
"""Steps after which a write-back without bytes of its own is reported done."""


class Hears(Protocol):
    """Who is told: a core, or one whose calls are recorded."""

    def notify(self, updates: Sequence[TransferUpdate]) -> None: ...

    def loaded(self, request_id: int) -> None: ...


class TransferDesk:
    """News of one engine's transfers. Times are nanoseconds of ``time.perf_counter_ns``."""

    def __init__(self, core: Hears, copies: CopyEngine) -> None:
        self._core = core
        self._copies = copies
        self._news: dict[int, list[TransferUpdate]] = {}
        self._landed: list[Landed] = []
        self._num_flying = 0
        self.h2d_bytes = 0
        """Moved by transfers of their own, one rank."""
        self.d2h_bytes = 0

    @property
    def outstanding(self) -> bool:
        """Whether something is still to be reported."""
        return bool(self._news or self._num_flying)

    def start(self, plan: StepPlan) -> None:
        """Change: note what a plan asks for whose step begins now."""
        for action in plan.actions:
            if isinstance(action, WriteBack | Restore):
                enqueued = TransferUpdate(action.transfer_id, TransferPhase.ENQUEUED)
                self._news.setdefault(plan.plan_id + 1, []).append(enqueued)
            if isinstance(action, WriteBack) and action.num_bytes:
                self._num_flying += 1
                self.d2h_bytes += action.num_bytes
            elif isinstance(action, WriteBack | Restore):
                done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
                self._news.setdefault(plan.plan_id + MIRRORED_LAG, []).append(done)
            elif isinstance(action, Load):
                self._num_flying += 1
                self.h2d_bytes += action.num_bytes

    def end(self, plan: StepPlan, started_ns: int) -> None:
        """Change: a plan's step has come back, its worker reports what it saw at its start."""
        self._landed += self._copies.landed()
        seen = [landed for landed in self._landed if landed.at_ns <= started_ns]
        self._landed = [landed for landed in self._landed if landed.at_ns > started_ns]
        self._tell(self._news.pop(plan.plan_id, []), seen)

    def report_idle(self) -> bool:
        """Change: nothing runs, tell all that is complete. Returns whether there was news."""
        self._landed += self._copies.landed()
        updates = [update for plan_id in sorted(self._news) for update in self._news[plan_id]]
        self._news.clear()
        landed, self._landed = self._landed, []
        self._tell(updates, landed)
        return bool(updates or landed)

    def _tell(self, updates: list[TransferUpdate], landed: list[Landed]) -> None:
        for transfer in landed:
            self._num_flying -= 1
            updates.append(TransferUpdate(transfer.transfer_id, TransferPhase.DONE))
            if transfer.request_id is not None:
                self._core.loaded(transfer.request_id)
        if updates:
            self._core.notify(updates)
