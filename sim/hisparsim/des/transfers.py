"""Transfers that outlive the step that starts them, and when the engine hears of them.

A worker looks for finished copies when a step starts and reports them with that step's output. A page whose
rows were mirrored during its step needs no bytes of its own: it is durable when that step has ended, seen at
the start of the step after next, and reported with its output (vLLM 0.33: enqueued after one step, done after
two). Copies that move bytes are flows on the replica's host link.
"""

from __future__ import annotations

import simpy

from hisparsim.des.links import HostLink, TransferKind
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import Load, Restore, StepPlan, TransferPhase, TransferUpdate, WriteBack

MIRRORED_LAG = 2
"""Steps after which a write-back without bytes of its own is reported done."""


class TransferDesk:
    """Starts the transfers of a replica's plans and reports their progress to its core."""

    def __init__(
        self, env: simpy.Environment, link: HostLink, core: ServingCore, store: TransferKind
    ) -> None:
        self.env = env
        self.link = link
        self.core = core
        self._store = store
        self._news: dict[int, list[TransferUpdate]] = {}  # plan -> reported with its output
        self._arrived: list[tuple[int, int, int | None]] = []  # (time, transfer, request it loads)
        self._flying: list[simpy.Event] = []
        self.num_flows = 0
        """Flows under way or not yet reported."""
        self.num_started = 0
        """Flows started so far."""
        self.h2d_bytes = 0
        self.d2h_bytes = 0

    @property
    def outstanding(self) -> bool:
        """Whether something is still to be reported."""
        return bool(self._news or self.num_flows)

    def flows(self) -> list[simpy.Event]:
        """Events of the flows that are still moving."""
        self._flying = [event for event in self._flying if not event.processed]
        return self._flying

    def start(self, plan: StepPlan) -> None:
        """A plan's step begins now: loads start, mirrored pages will be durable when it has ended."""
        for action in plan.actions:
            if isinstance(action, WriteBack):
                enqueued = TransferUpdate(action.transfer_id, TransferPhase.ENQUEUED)
                self._news.setdefault(plan.plan_id + 1, []).append(enqueued)
                if action.num_bytes:
                    self.num_flows += 1
                else:
                    done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
                    self._news.setdefault(plan.plan_id + MIRRORED_LAG, []).append(done)
            elif isinstance(action, (Load, Restore)):
                loads = action.request_id if isinstance(action, Load) else None
                if loads is None:
                    enqueued = TransferUpdate(action.transfer_id, TransferPhase.ENQUEUED)
                    self._news.setdefault(plan.plan_id + 1, []).append(enqueued)
                self.num_flows += 1
                self.h2d_bytes += action.num_bytes
                self._flow(action.num_bytes, TransferKind.RESTORE, action.transfer_id, loads)

    def quiet_plans(self, plan_id: int) -> int:
        """How many plans from this one on come back without news of a transfer. Changes nothing."""
        if self.num_flows or self._arrived:
            return 0
        return min(self._news) - plan_id if self._news else 1 << 30

    def end(self, plan: StepPlan, started_ns: int) -> None:
        """A plan's step has ended: the rows that it computed can be copied, its worker reports."""
        for action in plan.actions:
            if isinstance(action, WriteBack) and action.num_bytes:
                self.d2h_bytes += action.num_bytes
                self._flow(action.num_bytes, self._store, action.transfer_id, None)
        if self._news or self._arrived:
            self._report(plan.plan_id, started_ns)

    def _flow(self, num_bytes: int, kind: TransferKind, transfer_id: int, request_id: int | None) -> None:
        self.num_started += 1
        event = self.link.transfer(num_bytes, kind)
        self._flying.append(event)
        callbacks = event.callbacks
        assert callbacks is not None
        callbacks.append(lambda _event: self._arrived.append((int(self.env.now), transfer_id, request_id)))

    def _report(self, plan_id: int, started_ns: int) -> None:
        """A step that started then has ended: tell the core what its worker saw."""
        updates = self._news.pop(plan_id, [])
        if self._arrived:
            seen = [arrival for arrival in self._arrived if arrival[0] <= started_ns]
            if seen:
                self._arrived = [arrival for arrival in self._arrived if arrival[0] > started_ns]
                self._land(seen, updates)
        if updates:
            self.core.notify(updates)

    def report_idle(self) -> bool:
        """No step runs: what is durable by now is reported at once. Returns whether there was news."""
        updates = [update for plan_id in sorted(self._news) for update in self._news[plan_id]]
        self._news.clear()
        arrived, self._arrived = self._arrived, []
        self._land(arrived, updates)
        if updates:
            self.core.notify(updates)
        return bool(updates or arrived)

    def _land(self, arrived: list[tuple[int, int, int | None]], updates: list[TransferUpdate]) -> None:
        for _, transfer_id, request_id in arrived:
            self.num_flows -= 1
            updates.append(TransferUpdate(transfer_id, TransferPhase.DONE))
            if request_id is not None:
                self.core.loaded(request_id)
