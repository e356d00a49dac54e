"""What the engine processes of one run share: arrivals, the clock of tokens, and who is idle.

Priorities at one instant: a step ends first, then requests that arrive now are queued, then the next step is
planned, so a request that arrives just as a step ends is seen by the next plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import simpy

from hisparsim.des.arrivals import Arrivals
from hisparsim.des.identity import PageIdentity
from hisparsim.des.links import HostLinks
from hisparsim.des.recorder import TokenClock
from hisparsim.des.replica import Replica
from hisparsim.results.records import RequestStatus
from hisparsim.serving.progress import Completion
from hisparsim.serving.request import RequestSpec


@dataclass
class World:
    """What the gangs of one run share."""

    env: simpy.Environment
    arrivals: Arrivals
    identity: PageIdentity
    clock: TokenClock
    replicas: list[Replica]
    links: HostLinks
    seed: int
    draft_tokens: int
    acceptance: float
    check: bool
    """Run the conservation laws at every step."""
    step_by_step: bool
    """Spend an event on every step, quiet ones too."""
    blocked_ns: dict[str, int] = field(default_factory=dict)
    num_stall_steps: int = 0
    num_finished: int = 0
    progress: Any = None
    """Called with the number of finished requests after each step that finishes some."""
    _placed: dict[int, Replica] = field(default_factory=dict)
    _wake: simpy.Event | None = None

    def take_arrivals(self) -> None:
        """Submit who has arrived by now: a turn where its conversation is, others where least is to do."""
        now = int(self.env.now)
        due_ns = self.arrivals.next_ns()
        while due_ns is not None and due_ns <= now:
            for row in self.arrivals.due(now):
                self._submit(row, now)
            due_ns = self.arrivals.next_ns()

    def _submit(self, row: int, now: int) -> None:
        arrivals = self.arrivals
        prompt_tokens = arrivals.prompt_tokens[row]
        keys = self.identity.keys(row, prompt_tokens)
        spec = RequestSpec(row, prompt_tokens, arrivals.output_tokens[row], keys)
        replica = self.replicas[0]
        if len(self.replicas) > 1:
            with_parent = self._placed.get(int(arrivals.trace.parent[row]))
            replica = with_parent or min(self.replicas, key=lambda candidate: candidate.alive_tokens)
        reason = replica.core.refusal(spec)
        if reason is not None:
            arrivals.refuse(row, reason, now)
            return
        replica.core.submit(spec)
        replica.alive_tokens += spec.prompt_tokens + spec.output_tokens
        if len(self.replicas) > 1:
            self._placed[row] = replica
            self.wake()

    def finish(self, replica: Replica, completion: Completion) -> None:
        """Requests left the engine at this instant."""
        now = int(self.env.now)
        for request in completion.finished:
            replica.alive_tokens -= request.end_tokens
            self.arrivals.finished(request.request_id, now, RequestStatus.FINISHED)
        self.num_finished += len(completion.finished)
        if self.progress is not None:
            self.progress(self.num_finished)

    def others_finish_ns(self, replica: Replica) -> int | None:
        """Before this time no other replica finishes a request that others wait for; None = never."""
        if len(self.replicas) == 1 or not self.arrivals.wait_for_others:
            return None
        others = [other for other in self.replicas if other is not replica and other.core.num_alive]
        return min((other.busy_until_ns for other in others), default=None)

    def wake(self) -> None:
        """Let idle gangs look again."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def idle(self, replicas: list[Replica]) -> simpy.Event:
        """The event that ends an idle wait: the next arrival, a transfer's end, or somebody's call."""
        if self._wake is None or self._wake.triggered:
            self._wake = self.env.event()
        events = [self._wake, *(event for replica in replicas for event in replica.desk.flows())]
        next_ns = self.arrivals.next_ns()
        if next_ns is not None:
            events.append(self.env.timeout(max(next_ns - int(self.env.now), 0)))
        return self.env.any_of(events)
