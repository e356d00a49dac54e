"""The real runner without time: the loop of :mod:`hisparsim.serving.lockstep`, with real steps in it.

A transfer is reported so many steps after the plan that asked for it, whatever the wall clock says; its bytes
have been moved by then. What each step accepted comes from the step that was performed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hisparsim.serving.core import ServingCore
from hisparsim.serving.lockstep import Lags, Users
from hisparsim.serving.plan import (
    Idle,
    Load,
    Restore,
    StepPlan,
    TransferPhase,
    TransferUpdate,
    WriteBack,
)
from hisparsim.serving.request import Request, RequestSpec

from .decisions import Record, records_of
from .executor import StepOutput
from .work import Accepted, StepWork, bind, outcome_of

Perform = Callable[[StepWork], StepOutput]
"""Performs a step on all ranks."""


@dataclass(slots=True)
class LockstepLog:
    """What a run in lockstep decided and answered."""

    decisions: list[Record]
    answers: dict[int, list[int]]
    """Request -> sampled tokens, in order, preempted and surplus ones left out."""
    works: list[StepWork]


class LockstepRunner:
    """Drives one core and performs its plans."""

    def __init__(
        self,
        core: ServingCore,
        perform: Perform,
        submit: Callable[[RequestSpec], None],
        *,
        accepted: Accepted = lambda request, drafts: 0,
        check: bool = False,
    ) -> None:
        """``submit`` tells the executor of a request before the core hears of it."""
        self.core = core
        self.perform = perform
        self.tell = submit
        self.accepted = accepted
        self.check = check
        self.log = LockstepLog([], {}, [])
        self._news: dict[int, list[TransferUpdate]] = {}
        self._loads: dict[int, list[int]] = {}
        self._started: tuple[StepWork, StepOutput] | None = None

    def run(self, users: Users, lags: Lags, *, max_steps: int | None = None) -> LockstepLog:
        """Change: run until nobody is left.

        Raises:
            Wedged: nothing can move any more (only without ``max_steps``).
            LawBroken: with ``check``.
            RunDied: a step could not be performed.
        """
        core, queue = self.core, deque[tuple[int, StepPlan | Idle]]()
        for spec in users.first():
            self._submit(spec)
        index, finish_to_tell = 0, False
        while core.num_alive or queue or finish_to_tell or self._news:
            if max_steps is not None and index == max_steps:
                break
            if core.num_alive or finish_to_tell or self._news:
                stuck = not (core.plans_in_flight or finish_to_tell or self._news or self._loads)
                finish_to_tell = False
                plan = core.plan()
                if self.check:
                    core.check()
                self.log.decisions += records_of(index, plan)
                if isinstance(plan, StepPlan):
                    self._schedule(plan, index, lags)
                elif stuck and not core.notes.preemptions and max_steps is None:
                    raise core.wedged()
                queue.append((index, plan))
                index += 1
                self._start(queue[0][1])
                if len(queue) < core.limits.async_depth and (core.num_alive or self._news):
                    continue
            done_index, done = queue.popleft()
            finished = self._complete(done)
            for request_id in self._loads.pop(done_index, []):
                core.loaded(request_id)
            core.notify(self._news.pop(done_index, []))
            for request in finished:
                finish_to_tell = True
                follower = users.after(request.request_id)
                if follower is not None:
                    self._submit(follower)
            if queue:
                self._start(queue[0][1])
        return self.log

    def _submit(self, spec: RequestSpec) -> None:
        self.tell(spec)
        self.core.submit(spec)

    def _start(self, plan: StepPlan | Idle) -> None:
        """Perform the oldest plan, once: nothing before it is under way."""
        if self._started is None and isinstance(plan, StepPlan):
            work = bind(self.core, plan, self.accepted)
            self.log.works.append(work)
            self._started = (work, self.perform(work))

    def _complete(self, plan: StepPlan | Idle) -> list[Request]:
        if isinstance(plan, Idle):
            return []
        assert self._started is not None
        work, output = self._started
        self._started = None
        completion = self.core.complete(plan.plan_id, outcome_of(self.core, work))
        for request, kept in completion.tokens:
            tokens = self.log.answers.setdefault(request.request_id, [])
            tokens += output.sampled[request.request_id][:kept]
        return completion.finished

    def _schedule(self, plan: StepPlan, index: int, lags: Lags) -> None:
        for action in plan.actions:
            if isinstance(action, WriteBack | Restore):
                enqueued = TransferUpdate(action.transfer_id, TransferPhase.ENQUEUED)
                done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
                self._news.setdefault(index + lags.enqueued, []).append(enqueued)
                self._news.setdefault(index + max(lags.done, lags.enqueued), []).append(done)
            elif isinstance(action, Load):
                done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
                self._loads.setdefault(index + lags.loaded, []).append(action.request_id)
                self._news.setdefault(index + lags.loaded, []).append(done)
