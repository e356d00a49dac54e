"""Drive a serving core without time: one iteration a plan, transfers complete after so many steps.

The loop is an engine's with a batch queue: plan until ``async_depth`` plans are in flight, then bring the
oldest one back. A closed loop of users submits: whoever finishes is replaced at once. Two drivers of the same
core (a simulator's and a real runner's) that follow this loop make the same decisions, record for record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import (
    Idle,
    Load,
    Outcome,
    Restore,
    StepPlan,
    TransferPhase,
    TransferUpdate,
    WriteBack,
)
from hisparsim.serving.policy import Census
from hisparsim.serving.progress import Completion
from hisparsim.serving.request import Request, RequestSpec


class Users(Protocol):
    """A closed loop: who comes first, and who comes when a request finished."""

    def first(self) -> list[RequestSpec]: ...

    def after(self, request_id: int) -> RequestSpec | None: ...


@dataclass(frozen=True, slots=True)
class Lags:
    """Steps after the planning one with whose output a transfer is reported.

    A load waits for the steps in flight, where their blocks come back late: it counts from the next one.
    """

    enqueued: int = 1
    done: int = 2
    loaded: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class LockstepStep:
    """The state right after one ``plan()``."""

    index: int
    plan: StepPlan | Idle
    census: Census
    finished: int
    """Requests finished before this plan."""


def lockstep(
    core: ServingCore,
    users: Users,
    lags: Lags,
    *,
    accepted: Callable[[Request, int], int] | None = None,
    on_complete: Callable[[StepPlan, Completion], None] | None = None,
    check: bool = False,
    max_steps: int | None = None,
) -> Iterator[LockstepStep]:
    """Run until nobody is left and no transfer is under way, yielding each step.

    Args:
        accepted: how many of so many drafts of a request a speculative step accepts; none without it. Called
            once for each step that verifies drafts of the request, in the order of its steps.
        on_complete: called with each completed plan and what it produced.
        check: run the conservation laws after each plan.
        max_steps: stop after so many steps; a core that is stuck idles until then instead of raising.

    Raises:
        Wedged: nothing can move any more (only without ``max_steps``).
        LawBroken: with ``check``.
    """
    depth = core.limits.async_depth
    queue: deque[tuple[int, StepPlan | Idle]] = deque()
    news: dict[int, list[TransferUpdate]] = {}
    loads: dict[int, list[int]] = {}
    for spec in users.first():
        core.submit(spec)
    index = 0
    finish_to_tell = False
    while core.num_alive or queue or finish_to_tell or news:
        if max_steps is not None and index == max_steps:
            return
        if core.num_alive or finish_to_tell or news:
            stuck = not (core.plans_in_flight or finish_to_tell or news or loads)
            finish_to_tell = False
            # Steps in flight may still read or write the blocks that a load fills: it waits for them.
            load_start = index + (core.is_computing and core.policy.defers_frees)
            plan = core.plan()
            if check:
                core.check()
            yield LockstepStep(index, plan, core.policy.census(core.running), core.num_finished)
            if isinstance(plan, StepPlan):
                _schedule_transfers(plan, index, load_start, lags, news, loads)
            elif stuck and not core.notes.preemptions and max_steps is None:
                raise core.wedged()
            queue.append((index, plan))
            index += 1
            if len(queue) < depth and (core.num_alive or news):
                continue
        done_index, done = queue.popleft()
        finished: list[Request] = []
        if isinstance(done, StepPlan):
            completion = core.complete(done.plan_id, _outcome(core, done, accepted))
            if on_complete is not None:
                on_complete(done, completion)
            finished = completion.finished
        for request_id in loads.pop(done_index, []):
            core.loaded(request_id)
        core.notify(news.pop(done_index, []))
        for request in finished:
            finish_to_tell = True
            follower = users.after(request.request_id)
            if follower is not None:
                core.submit(follower)


def _schedule_transfers(
    plan: StepPlan,
    index: int,
    load_start: int,
    lags: Lags,
    news: dict[int, list[TransferUpdate]],
    loads: dict[int, list[int]],
) -> None:
    for action in plan.actions:
        if isinstance(action, WriteBack | Restore):
            enqueued = TransferUpdate(action.transfer_id, TransferPhase.ENQUEUED)
            done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
            news.setdefault(index + lags.enqueued, []).append(enqueued)
            news.setdefault(index + max(lags.done, lags.enqueued), []).append(done)
        elif isinstance(action, Load):
            done = TransferUpdate(action.transfer_id, TransferPhase.DONE)
            loads.setdefault(load_start + lags.loaded, []).append(action.request_id)
            news.setdefault(load_start + lags.loaded, []).append(done)


def _outcome(core: ServingCore, plan: StepPlan, accepted: Callable[[Request, int], int] | None) -> Outcome:
    if accepted is None:
        return Outcome()
    return Outcome(
        {
            request.request_id: 1 + accepted(request, drafts)
            for request, drafts in core.drafts_to_verify(plan.plan_id)
        }
    )
