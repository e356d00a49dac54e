"""Departures: blocks of requests that left come back at once, or when nothing can write them any more.

Two things may still write a block after its request left: a step in flight (where the policy defers frees)
and a load from a slower tier.
"""

from __future__ import annotations

from collections import deque

from hisparsim.serving.policy import LateFree, ResidencyPolicy
from hisparsim.serving.request import Request
from hisparsim.serving.steady import SteadyDecodes


class Departures:
    """Who left, and which of their blocks are still to come back."""

    def __init__(self, policy: ResidencyPolicy, steady: SteadyDecodes) -> None:
        self.late: deque[tuple[int, LateFree]] = deque()
        """(last plan that may write the blocks, what frees them), oldest first."""
        self._policy = policy
        self._steady = steady
        self._loading: dict[int, Request] = {}

    def leave(self, request: Request, *, finished: bool) -> None:
        """Change: the policy takes everything back from a request that holds memory."""
        in_flight = self._policy.defers_frees and request.last_plan > self._steady.completed
        late = self._policy.leave(request, finished=finished, in_flight=in_flight)
        if late is not None:
            self.late.append((self._steady.planned, late))
        request.ledger = None
        request.slot_tokens = 0
        request.next_seal = 0

    def leave_when_loaded(self, request: Request) -> None:
        """Change: the request is gone, but a load still writes its blocks."""
        self._loading[request.request_id] = request

    def loaded(self, request_id: int) -> bool:
        """Change: a load is complete; says whether it was that of a request that had left."""
        request = self._loading.pop(request_id, None)
        if request is None:
            return False
        self.leave(request, finished=False)
        return True

    def give_back(self) -> bool:
        """Change: free what only completed steps could write; says whether there was anything."""
        late, completed = self.late, self._steady.completed
        any_due = False
        while late and late[0][0] <= completed:
            late.popleft()[1]()
            any_due = True
        return any_due
