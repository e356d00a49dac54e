"""Steady decodes: running requests that gain one token in every plan and need nothing else.

Most steps of a server only lengthen contexts. A steady request is not touched by them: plans and completions
are counted for all steady requests at once, and a request's own counters follow when somebody looks
(``settle``). Each carries the number of the first plan in which something may happen to it (``wake``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.serving.request import Request


@dataclass(slots=True)
class PlanInFlight:
    """A plan that has not come back: whom it lists, and how many steady requests it implies."""

    plan_id: int
    sequence: int
    """Number of the plan among those that compute something, from 1."""
    requests: list[Request]
    counts: list[int]
    drafts: list[int]
    yields: list[bool]
    steady: tuple[Request, ...]
    """Steady requests when it was made; those in ``listed_since`` are listed by now."""
    listed_since: set[int] = field(default_factory=set)

    def steady_members(self) -> tuple[Request, ...]:
        """Query: requests that gain a token from it without being listed."""
        if not self.listed_since:
            return self.steady
        return tuple(request for request in self.steady if request.request_id not in self.listed_since)


class SteadyDecodes:
    """The steady requests and the counts that they share."""

    def __init__(self, plans: deque[PlanInFlight], *, asynchronous: bool) -> None:
        self.plans = plans
        """Plans in flight, oldest first."""
        self.planned = 0
        """Plans made so far that compute something."""
        self.completed = 0
        """Of those, how many have come back."""
        self._asynchronous = asynchronous
        self._unlisted_tokens = 1 if asynchronous else 2
        self._members: dict[int, Request] = {}
        self._offset_of: dict[int, int] = {}  # computed tokens less plans made, the same while it is steady
        self._end_of: dict[int, int] = {}  # plans made when it has to be listed because it ends
        self._left: list[Request] = []
        self._snapshot: tuple[Request, ...] | None = ()
        self._ids: tuple[int, ...] = ()
        self._first_end = 0
        self._offsets: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[Request, ...]:
        """Query: the steady requests."""
        if self._snapshot is None:
            self._refresh()
        assert self._snapshot is not None
        return self._snapshot

    @property
    def ids(self) -> tuple[int, ...]:
        """Query: their request ids."""
        if self._snapshot is None:
            self._refresh()
        return self._ids

    def contexts(self) -> NDArray[np.int64]:
        """Query: [members] tokens computed or planned of each."""
        if self._snapshot is None:
            self._refresh()
        return self._offsets + self.planned

    def plans_until_end(self) -> int:
        """Query: plans from now on that list none of them because it ends."""
        if self._snapshot is None:
            self._refresh()
        return self._first_end - self.planned

    def _refresh(self) -> None:
        self._snapshot = tuple(self._members.values())
        self._ids = tuple(self._members)
        self._offsets = np.array(list(self._offset_of.values()), np.int64)
        self._first_end = min(self._end_of.values(), default=0)

    def end(self, request: Request) -> int:
        """Query: computed tokens at which a steady request has to be listed because it ends.

        Its last token is one that is never computed. With two plans in flight it is listed when all is
        planned; else in its last plan, so that it leaves when that one comes back.
        """
        return request.end_tokens - self._unlisted_tokens

    def quiet_until(self, policy: ResidencyPolicy, request: Request) -> int:
        """Query: computed tokens below which a steady request needs nothing and cannot finish."""
        return min(policy.quiet_until(request), self.end(request))

    def join(self, request: Request, wake: int) -> None:
        """Change: from the next plan on the request is implied until ``wake``."""
        request.steady = True
        request.wake = wake
        request.base_planned = request.base_completed = request.steady_since = self.planned
        offset = request.computed - self.planned
        self._members[request.request_id] = request
        self._offset_of[request.request_id] = offset
        self._end_of[request.request_id] = self.end(request) - offset
        self._snapshot = None

    def settle(self, request: Request) -> None:
        """Change: bring the counters of a steady request up to date."""
        planned = self.planned - request.base_planned
        returned = self.completed - request.base_completed
        if returned > 0:
            request.known += returned
            request.output_tokens += returned
            request.in_flight -= returned
            request.placeholders -= returned if self._asynchronous else 0
            request.base_completed = self.completed
            request.steady_through = self.completed
        if planned > 0:
            request.computed += planned
            request.in_flight += planned
            request.placeholders += planned if self._asynchronous else 0
            request.last_plan = self.planned
            request.base_planned = self.planned

    def settle_all(self) -> None:
        """Change: bring the counters of all steady requests up to date."""
        for request in self._members.values():
            self.settle(request)

    def leave(self, request: Request) -> None:
        """Change: the request is listed again, also in the plans in flight that implied it."""
        self.settle(request)
        request.steady = False
        request.wake = 0
        if request.steady_through == self.completed:
            self._left.append(request)
        del self._members[request.request_id]
        del self._offset_of[request.request_id]
        del self._end_of[request.request_id]
        self._snapshot = None
        for plan in self.plans:
            if plan.sequence > request.steady_since:
                plan.requests.append(request)
                plan.counts.append(1)
                plan.drafts.append(0)
                plan.yields.append(True)
                plan.listed_since.add(request.request_id)

    def take_left(self) -> list[Request]:
        """Change: who left since the last call, having gained a token in the plan that came back last."""
        if not self._left:
            return []
        left, self._left = self._left, []
        return left

    def leave_all(self) -> None:
        """Change: all steady requests are listed again."""
        for request in list(self._members.values()):
            self.leave(request)

    def skip(self, rounds: int) -> None:
        """Change: so many further plans were made and as many came back, none of them listing anybody."""
        self.planned += rounds
        self.completed += rounds
        for plan in self.plans:
            plan.plan_id += rounds
            plan.sequence += rounds
