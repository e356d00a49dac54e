"""The serving loop: the SimPy process of replicas that step together.

A gang is one replica, or all that share experts (EP): its step lasts as long as its slowest replica, the
expert layers see all replicas' tokens, and replicas without work run dummy steps. With two plans in flight,
plan n+1 is made when step n starts; what arrives or completes during n is first seen by plan n+2.

Stretches of quiet steps (decodes that only lengthen contexts) are priced at once and take one event.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, TypeAlias

import simpy

from hisparsim.cost.model import StepCost
from hisparsim.cost.terms import Term
from hisparsim.des.draws import tokens_of_verify_step
from hisparsim.des.recorder import BASE_COLUMNS, StepTable
from hisparsim.des.replica import Replica, Snapshot
from hisparsim.des.world import World
from hisparsim.serving.plan import Admit, Load, Outcome, Restore, StepPlan, WriteBack

Taken: TypeAlias = tuple[Replica, StepPlan, Snapshot]
"""A plan whose step begins, and the state after it was made."""
STEP_TABLE_COLUMNS = (*BASE_COLUMNS, *(f"cost_{term.value}_ns" for term in Term))
MIN_STRETCH = 3
"""Fewer quiet steps than this cost less one by one."""
MAX_STRETCH = 4096
_H2D = BASE_COLUMNS.index("h2d_bytes")
_NO_OUTCOME = Outcome()
_TRANSFERS = (WriteBack, Load, Restore)


class Gang:
    """Replicas that step together, and the record of their steps."""

    def __init__(self, world: World, replicas: list[Replica]) -> None:
        self.world = world
        self.replicas = replicas
        self.steps = StepTable(STEP_TABLE_COLUMNS)
        self.num_events = 0
        """SimPy events that steps took."""
        self._decode_ns = 1
        """What the last quiet step took."""
        self._idle_start_ns = replicas[0].cost.idle_start_ns()
        self._alone = len(replicas) == 1
        self._stretches = self._alone and not (world.check or world.step_by_step)
        self._plans_ahead = replicas[0].core.limits.async_depth > 1

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The SimPy process: plan, price, wait, complete."""
        world, env = self.world, self.world.env
        while True:
            world.take_arrivals()
            active = [replica for replica in self.replicas if replica.prepare()]
            if not active:
                if any([replica.desk.report_idle() for replica in self.replicas]):
                    continue
                if any(replica.core.notes.preemptions for replica in self.replicas):
                    continue  # who was preempted may come back at once
                if not self._anything_to_come():
                    return
                had_nothing = not any([replica.core.num_alive for replica in self.replicas])
                yield world.idle(self.replicas)
                if had_nothing and self._idle_start_ns:
                    yield env.timeout(self._idle_start_ns)
                continue
            if self._start_loads(active):
                continue
            self.num_events += 1
            if self._stretches:
                duration_ns = self._stretch(active[0])
                if duration_ns:
                    yield env.timeout(duration_ns)
                    continue
            started_ns = int(env.now)
            taken = [self._take_plan(replica) for replica in active]
            duration_ns, costs, missed = self._price(taken)
            moved = [replica.moved_bytes() for replica in self.replicas]
            for replica, plan, _ in taken:
                replica.busy_until_ns = started_ns + duration_ns
                if plan.actions:
                    self._note_admissions(replica, plan, started_ns)
                    replica.desk.start(plan)
            self._record(started_ns, duration_ns, taken, costs, missed, moved)
            if self._plans_ahead:
                for replica in self.replicas:
                    replica.prepare()
            if world.check:
                for replica in active:
                    replica.core.check()
                world.links.check()
            yield env.timeout(duration_ns)
            for replica, plan, _ in taken:
                self._complete(replica, plan, started_ns)

    def _start_loads(self, active: list[Replica]) -> bool:
        """Take plans that compute nothing and only start loads: they need no time."""
        empty = [r for r in active if r.next_plan is not None and not r.next_plan.computes]
        for replica in empty:
            _, plan, _ = self._take_plan(replica)
            now_ns = int(self.world.env.now)
            self._note_admissions(replica, plan, now_ns)
            replica.desk.start(plan)
            self._complete(replica, plan, now_ns)
        return bool(empty)

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
    def _take_plan(replica: Replica) -> Taken:
        plan, snapshot = replica.next_plan, replica.next_snapshot
        assert plan is not None and snapshot is not None
        replica.next_plan = replica.next_snapshot = None
        return replica, plan, snapshot

    def _price(self, taken: list[Taken]) -> tuple[int, list[StepCost], int]:
        """The step's duration, each replica's cost, and the missed thousandths of a row of all."""
        loads = [replica.load(plan) for replica, plan, _ in taken]
        if not self._alone:
            tokens = sum(load.num_tokens for load in loads)
            loads = [load.with_expert_tokens(tokens) for load in loads]
        costs, missed, duration_ns = [], 0, 0
        for index, load in enumerate(loads):
            replica = taken[index][0]
            cost = replica.price(load)
            replica.count_bytes(cost)
            costs.append(cost)
            missed += int(load.missed_millirows)
            duration_ns = max(duration_ns, int(cost.total_ns))
        return duration_ns, costs, missed

    def _complete(self, replica: Replica, plan: StepPlan, started_ns: int) -> None:
        world = self.world
        outcome = self._outcome(replica, plan) if world.draft_tokens else _NO_OUTCOME
        completion = replica.core.complete(plan.plan_id, outcome)
        world.clock.tokens(completion, replica.last_end, int(world.env.now))
        replica.desk.end(plan, started_ns)
        if completion.finished:
            world.finish(replica, completion)
            if len(world.replicas) > len(self.replicas):
                world.wake()

    def _outcome(self, replica: Replica, plan: StepPlan) -> Outcome:
        world = self.world
        return Outcome(
            {
                request.request_id: tokens_of_verify_step(
                    world.seed, request.request_id, request.output_tokens, drafts, world.acceptance
                )
                for request, drafts in replica.core.drafts_to_verify(plan.plan_id)
            }
        )

    # -- quiet stretches --------------------------------------------------------------------------

    def _stretch(self, replica: Replica) -> int:
        """Take a stretch of quiet steps at once: its nanoseconds, or 0 where there is none."""
        core, plan, world = replica.core, replica.next_plan, self.world
        assert plan is not None
        if plan.prefills or any([isinstance(action, _TRANSFERS) for action in plan.actions]):
            return 0
        count = min(core.quiet_steps(), replica.desk.quiet_plans(plan.plan_id), MAX_STRETCH)
        started_ns = int(world.env.now)
        arrival_ns = world.arrivals.next_ns()
        if arrival_ns is not None:  # about as many as there is time for, so that few are priced in vain
            count = min(count, (arrival_ns - started_ns) // self._decode_ns + 2)
        if count < MIN_STRETCH:
            return 0
        load, rows = replica.stretch_load(plan, count)
        cost = replica.price(load)
        durations = cost.totals(count)
        ends = durations.cumsum()
        ends += started_ns
        starts = ends - durations
        if arrival_ns is not None:
            # The next plan is made when a step starts (with one plan in flight: when it has ended), and the
            # first one that is made after the arrival sees it.
            made = starts if core.limits.async_depth > 1 else ends
            count = int(made.searchsorted(arrival_ns))
        finish_ns = world.others_finish_ns(replica)
        if finish_ns is not None:
            count = min(count, int(ends.searchsorted(finish_ns)))
        if count < MIN_STRETCH:
            return 0
        snapshot = replica.next_snapshot
        assert snapshot is not None
        ended_ns = int(ends[count - 1])
        total_ns = ended_ns - started_ns
        self._decode_ns = max(int(durations[0]), 1)
        moved = (cost.h2d_bytes, cost.d2h_bytes, load.missed_millirows, snapshot.preemptions)
        state = self._state(plan, snapshot)
        table = self.steps.extend(count, (starts, durations, *state, *moved, *cost.terms.values()))
        self._note_admissions(replica, plan, started_ns)
        self._count_blocked(snapshot, total_ns, count)
        snapshot = replica.snapshot()  # requests that arrived since the first plan wait behind a blocked head
        table[1:, 2:_H2D] = self._state(plan, snapshot)
        replica.rows.add(rows, count)
        replica.count_bytes(cost, count)
        for at_round, census in core.advance(count):
            snapshot = replica.snapshot_of(census)
            table[at_round:, 2:_H2D] = self._state(plan, snapshot)
        replica.next_snapshot = snapshot
        world.clock.stretch(plan.decodes.num_requests, replica.last_end, ends[:count])
        replica.busy_until_ns = ended_ns
        replica.next_plan = plan.later(count)
        return total_ns

    # -- the record -------------------------------------------------------------------------------

    def _note_admissions(self, replica: Replica, plan: StepPlan, started_ns: int) -> None:
        admitted_ns = self.world.clock.admitted_ns
        for action in plan.actions:
            if not isinstance(action, Admit):
                continue
            if admitted_ns[action.request_id] < 0:
                admitted_ns[action.request_id] = started_ns
            if action.resumed:
                replica.hot.forget(action.request_id)

    def _count_blocked(self, snapshot: Snapshot, duration_ns: int, num_steps: int) -> None:
        world, reason = self.world, snapshot.blocked_by
        if snapshot.waiting and reason:
            world.blocked_ns[reason] = world.blocked_ns.get(reason, 0) + duration_ns
        world.num_stall_steps += snapshot.waited * num_steps

    @staticmethod
    def _state(plan: StepPlan, s: Snapshot) -> tuple[int, ...]:
        """The columns between ``duration_ns`` and ``h2d_bytes``."""
        decodes = len(plan.decodes.request_ids)
        prefill = sum([chunk.num_tokens for chunk in plan.prefills]) if plan.prefills else 0
        return (decodes, decodes * plan.decodes.query_tokens, prefill, *s.state)

    def _record(
        self,
        started_ns: int,
        duration_ns: int,
        taken: list[Taken],
        costs: list[StepCost],
        missed: int,
        moved: list[tuple[int, int]],
    ) -> None:
        (_, plan, snapshot), slowest, (h2d, d2h) = taken[0], costs[0], moved[0]
        state, preemptions = self._state(plan, snapshot), snapshot.preemptions
        self._count_blocked(snapshot, duration_ns, 1)
        if self._alone:
            h2d += int(slowest.h2d_bytes)
            d2h += int(slowest.d2h_bytes)
        else:
            for _, plan, snapshot in taken[1:]:
                state = tuple(a + b for a, b in zip(state, self._state(plan, snapshot), strict=True))
                preemptions += snapshot.preemptions
                self._count_blocked(snapshot, duration_ns, 1)
            slowest = max(costs, key=lambda cost: int(cost.total_ns))
            h2d = max([int(cost.h2d_bytes) for cost in costs]) + max([to_gpu for to_gpu, _ in moved])
            d2h = max([int(cost.d2h_bytes) for cost in costs]) + max([to_host for _, to_host in moved])
        priced: Iterable[Any] = slowest.terms.values()
        self.steps.append((started_ns, duration_ns, *state, h2d, d2h, missed, preemptions, *priced))
