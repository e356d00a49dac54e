"""The serving loop: what all engine processes share, and the process of a gang of replicas.

Priorities at one instant: a step ends first, then requests that arrive now are queued, then the next step is
planned, so a request that arrives just as a step ends is seen by the next plan.

A gang is one replica, or all that step together because they share experts (EP): its step lasts as long as
its slowest replica, the expert layers see all replicas' tokens, and replicas without work run dummy steps.
With two plans in flight, plan n+1 is made when step n starts; what happens during n is seen by plan n+2.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from hisparsim.cost.terms import Term
from hisparsim.des.arrivals import Arrivals
from hisparsim.des.draws import tokens_of_verify_step
from hisparsim.des.identity import PageIdentity
from hisparsim.des.links import HostLinks
from hisparsim.des.recorder import BASE_COLUMNS, StepTable, TokenClock
from hisparsim.des.replica import Replica, Snapshot
from hisparsim.results.records import RequestStatus
from hisparsim.serving.core import Completion
from hisparsim.serving.plan import Outcome, StepPlan
from hisparsim.serving.request import RequestSpec

TERMS = tuple(Term)
STEP_TABLE_COLUMNS = (*BASE_COLUMNS, *(f"cost_{term.value}_ns" for term in TERMS))


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
        trace = self.arrivals.trace
        spec = RequestSpec(
            row, self.arrivals.prompt_tokens[row], int(trace.output_tokens[row]), self.identity.keys(row)
        )
        replica = self._placed.get(int(trace.parent[row]))
        if replica is None:
            replica = min(self.replicas, key=lambda candidate: candidate.alive_tokens)
        reason = replica.core.refusal(spec)
        if reason is not None:
            self.arrivals.refuse(row, reason, now)
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


class Gang:
    """Replicas that step together, and the record of their steps."""

    def __init__(self, world: World, replicas: list[Replica]) -> None:
        self.world = world
        self.replicas = replicas
        self.steps = StepTable(STEP_TABLE_COLUMNS)
        self.num_events = 0
        """SimPy events that steps took."""

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The SimPy process: plan, price, wait, complete."""
        world, env = self.world, self.world.env
        while True:
            world.take_arrivals()
            active = [replica for replica in self.replicas if replica.prepare()]
            if not active:
                if any([replica.desk.report_idle() for replica in self.replicas]):
                    continue
                if not self._anything_to_come():
                    return
                yield world.idle(self.replicas)
                continue
            started_ns = int(env.now)
            plans = [self._take_plan(replica) for replica in active]
            duration_ns, costs, missed = self._price(active, [plan for plan, _ in plans])
            for replica, (plan, _) in zip(active, plans, strict=True):
                replica.desk.start(plan)
            self._record(started_ns, duration_ns, plans, costs, missed)
            for replica in self.replicas:
                if replica.core.limits.async_depth > 1:
                    replica.prepare()
            if world.check:
                for replica in active:
                    replica.core.check()
                world.links.check()
            self.num_events += 1
            yield env.timeout(duration_ns)
            for replica, (plan, _) in zip(active, plans, strict=True):
                self._complete(replica, plan, started_ns)

    def _anything_to_come(self) -> bool:
        """Whether waiting can help; raises Wedged where requests wait for nothing."""
        world = self.world
        if world.arrivals.next_ns() is not None or any(r.desk.outstanding for r in self.replicas):
            return True
        stuck = [replica for replica in self.replicas if replica.core.num_alive]
        if stuck:
            raise stuck[0].core.wedged()
        return any(replica.core.num_alive for replica in world.replicas)

    @staticmethod
    def _take_plan(replica: Replica) -> tuple[StepPlan, Snapshot]:
        plan, snapshot = replica.next_plan, replica.next_snapshot
        assert plan is not None and snapshot is not None
        replica.next_plan = replica.next_snapshot = None
        return plan, snapshot

    def _price(self, active: list[Replica], plans: list[StepPlan]) -> tuple[int, list[Any], int]:
        loads = [replica.load(plan) for replica, plan in zip(active, plans, strict=True)]
        if len(self.replicas) > 1:
            tokens = sum(load.num_tokens for load in loads)
            loads = [load.with_expert_tokens(tokens) for load in loads]
        costs = [replica.price(load) for replica, load in zip(active, loads, strict=True)]
        missed = sum(int(load.missed_millirows) for load in loads)
        return max(int(cost.total_ns) for cost in costs), costs, missed

    def _complete(self, replica: Replica, plan: StepPlan, started_ns: int) -> None:
        world = self.world
        outcome = Outcome()
        if world.draft_tokens:
            outcome = Outcome(
                {
                    request_id: tokens_of_verify_step(
                        world.seed,
                        request_id,
                        replica.core.requests[request_id].output_tokens,
                        world.draft_tokens,
                        world.acceptance,
                    )
                    for request_id in plan.decodes.request_ids
                    if request_id in replica.core.requests
                }
            )
        completion = replica.core.complete(plan.plan_id, outcome)
        replica.desk.end(plan)
        world.clock.tokens(completion, int(world.env.now))
        replica.desk.report(plan.plan_id, started_ns)
        if completion.finished:
            world.finish(replica, completion)
            if len(world.replicas) > len(self.replicas):
                world.wake()

    def _record(
        self,
        started_ns: int,
        duration_ns: int,
        plans: list[tuple[StepPlan, Snapshot]],
        costs: list[Any],
        missed: int,
    ) -> None:
        world = self.world
        slowest = max(range(len(costs)), key=lambda index: int(costs[index].total_ns))
        total = [0] * 16
        for plan, s in plans:
            for action_time, admitted in self._admissions(plan, started_ns):
                if world.clock.admitted_ns[admitted] < 0:
                    world.clock.admitted_ns[admitted] = action_time
            decodes = plan.decodes.num_requests
            prefill = sum(chunk.num_tokens for chunk in plan.prefills)
            values = (
                decodes, decodes * plan.decodes.query_tokens, prefill, s.running, s.waiting, s.num_full,
                s.num_mixed, s.num_none, s.free, s.index, s.pinned, s.released, s.hot, s.other, s.host,
                s.preemptions,
            )  # fmt: skip
            total = [a + b for a, b in zip(total, values, strict=True)]
            if s.waiting and s.blocked_by:
                world.blocked_ns[s.blocked_by] = world.blocked_ns.get(s.blocked_by, 0) + duration_ns
            world.num_stall_steps += s.waited
        cost = costs[slowest]
        h2d = max(int(c.h2d_bytes) for c in costs)
        d2h = max(int(c.d2h_bytes) for c in costs)
        terms = cost.terms
        self.steps.append(
            (
                started_ns,
                duration_ns,
                *total[:15],
                h2d,
                d2h,
                missed,
                total[15],
                *(int(terms.get(term, 0)) for term in TERMS),
            )
        )

    @staticmethod
    def _admissions(plan: StepPlan, started_ns: int) -> list[tuple[int, int]]:
        from hisparsim.serving.plan import Admit

        return [(started_ns, action.request_id) for action in plan.actions if isinstance(action, Admit)]
