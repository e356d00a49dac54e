"""The serving core: continuous batching with chunked prefill, first come first served, no clock.

``plan()`` decides the next step and changes the ledgers; ``complete()`` brings a step's tokens back. With
``async_depth`` 2 (vLLM's asynchronous scheduling) a step is planned while the one before it runs, so the
scheduler counts tokens that it has not seen. The rules are those of vLLM 0.33's V1 scheduler, described in
docs/conformance.md; memory is the policy's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.departures import Departures
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Action, Finish, Idle, Load, Outcome, Restore, StepPlan, TransferUpdate
from hisparsim.serving.plan_maker import PlanMaker
from hisparsim.serving.policy import Census, ResidencyPolicy
from hisparsim.serving.progress import Completion, ProtocolError, StepNotes, Wedged
from hisparsim.serving.request import Request, RequestSpec, Status
from hisparsim.serving.running import RunningQueue
from hisparsim.serving.steady import PlanInFlight, SteadyDecodes
from hisparsim.serving.waiting import WaitingQueue


class ServingCore:
    """Queues, token counts and the order of things; see DESIGN of the protocol in docs/architecture.md."""

    def __init__(self, limits: ServingLimits, policy: ResidencyPolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.running: list[Request] = []
        """In order of admission."""
        self.requests: dict[int, Request] = {}
        """All that are alive."""
        self.notes = StepNotes()
        self.num_finished = 0
        self.discarded_tokens = 0
        self._news: list[Action] = []
        self._plans: deque[PlanInFlight] = deque()
        self._steady = SteadyDecodes(self._plans, asynchronous=limits.async_depth > 1)
        self._departures = Departures(policy, self._steady)
        self._waiting = WaitingQueue(limits, policy, self.running, self._news)
        self._running = RunningQueue(
            limits, policy, self._steady, self.running, self._waiting, self._departures, self._news
        )
        self._maker = PlanMaker(limits, policy, self._steady, self._waiting.prefilling, self._news)
        self._ends_steps = type(policy).end_step is not ResidencyPolicy.end_step
        self._memory_moved = False  # since the last plan, by transfers, departures or late frees

    # -- requests come and go ---------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> Request:
        """Queue a request that :meth:`refusal` has nothing against.

        Raises:
            ProtocolError: its id is in use.
        """
        if spec.request_id in self.requests:
            raise ProtocolError(f"request {spec.request_id} was submitted already")
        request = Request(spec)
        self.requests[spec.request_id] = request
        self.waiting.append(request)
        return request

    def refusal(self, spec: RequestSpec) -> str | None:
        """One line that says why an empty engine could never serve a request, or None. Changes nothing."""
        total = spec.prompt_tokens + spec.output_tokens
        if total > self.limits.max_model_len:
            return (
                f"request {spec.request_id} needs {total:,} tokens, the window has "
                f"{self.limits.max_model_len:,} (scheduler.max_model_len)"
            )
        return self.policy.fits_alone(Request(spec))

    def cancel(self, request_id: int) -> None:
        """Take a request out, wherever it is; tokens under way are discarded when they come back.

        Raises:
            ProtocolError: no such request is alive.
        """
        request = self.requests.get(request_id)
        if request is None:
            raise ProtocolError(f"request {request_id} is not alive")
        if request.steady:
            self._steady.leave(request)
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._retire(request, Status.CANCELLED)

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        """Transfers moved on; may come at any time, also while idle."""
        self.policy.notify(updates)
        self._memory_moved = True

    def loaded(self, request_id: int) -> None:
        """A load that a request waits for is complete: it may be scheduled.

        Raises:
            ProtocolError: no request waits for a load under this id.
        """
        if self._departures.loaded(request_id):
            return
        request = self.requests.get(request_id)
        if request is None or request.status is not Status.LOADING:
            raise ProtocolError(f"request {request_id} does not wait for a load")
        self._waiting.loaded(request)

    @property
    def waiting(self) -> deque[Request]:
        """Requests that do not run, in the order in which they are to be admitted."""
        return self._waiting.requests

    @property
    def num_preemptions(self) -> int:
        return self._running.num_preemptions

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens found in caches by all admissions, loaded ones left out."""
        return self._waiting.prefix_hit_tokens

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

    @property
    def is_computing(self) -> bool:
        """Whether a plan with tokens is in flight."""
        return self._steady.planned > self._steady.completed

    @property
    def num_alive(self) -> int:
        return len(self.requests)

    def drafts_to_verify(self, plan_id: int) -> list[tuple[Request, int]]:
        """Live requests whose drafts a plan in flight verifies, and how many. Changes nothing."""
        plan = next(plan for plan in self._plans if plan.plan_id == plan_id)
        return [
            (request, drafts)
            for request, drafts in zip(plan.requests, plan.drafts, strict=True)
            if drafts and request.request_id in self.requests
        ]

    def wedged(self) -> Wedged:
        """The error to raise when ``plan()`` is idle and nothing will ever change that."""
        head = self.waiting[0] if self.waiting else self.running[0]
        reason = self.notes.blocked_by or self.policy.blocked_by or "memory"
        return Wedged(
            f"request {head.request_id} ({head.known:,} tokens) waits for {reason} and nothing is under way "
            f"that could free it: {self.policy.pool.num_free:,} of {self.policy.pool.num_usable:,} GPU "
            "blocks are free"
        )

    # -- planning ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan | Idle:
        """Decide the next step; changes the ledgers.

        Raises:
            ProtocolError: ``async_depth`` plans are in flight already.
        """
        if len(self._plans) >= self.limits.async_depth:
            raise ProtocolError(f"{len(self._plans)} plans are in flight, async_depth allows no more")
        notes = self.notes = StepNotes()
        self._memory_moved = False
        self.policy.begin_step()
        chosen: list[Request] = []
        counts: list[int] = []
        woken: list[Request] = []
        budget = self._running.schedule(chosen, counts, woken, notes)
        num_running_chosen = len(chosen)
        if self.waiting and not notes.preemptions:
            self._waiting.admit(chosen, counts, budget, notes)
        if self._ends_steps:
            self.policy.end_step(self._running.for_end_of_step(chosen, counts, woken))
        notes.scheduled = tuple(chosen)
        notes.steady = self._steady.members
        if not chosen and not notes.steady:
            starts_load = any(isinstance(action, Load | Restore) for action in self.policy.actions)
            if not starts_load:
                return Idle(notes.blocked_by or "no request is ready")
        return self._maker.make(chosen, counts, num_running_chosen, notes)

    # -- completion -------------------------------------------------------------------------------

    def complete(self, plan_id: int, outcome: Outcome) -> Completion:
        """Bring the tokens of the oldest plan back; finished requests leave.

        Raises:
            ProtocolError: another plan is the oldest one.
        """
        if not self._plans or self._plans[0].plan_id != plan_id:
            oldest = self._plans[0].plan_id if self._plans else None
            raise ProtocolError(f"plan {plan_id} completed, the oldest in flight is {oldest}")
        if outcome.stopped:
            for request in self._steady.members:
                if request.request_id in outcome.stopped:
                    self._steady.leave(request)
        left = self._steady.take_left()
        plan = self._plans.popleft()
        self._steady.completed += bool(plan.requests or plan.steady)
        if self._departures.late and self._departures.give_back():
            self._memory_moved = True
        result = Completion(plan.steady_members(), left)
        if not plan.requests:
            return result
        for request, count, verified, gives in zip(
            plan.requests, plan.counts, plan.drafts, plan.yields, strict=True
        ):
            request.in_flight -= count
            stale = request.stale > 0
            if stale:
                request.stale -= count
            if request.status is Status.FINISHED or request.status is Status.CANCELLED:
                result.surplus_tokens += gives
                continue
            if gives:
                self._take_tokens(request, verified, stale, outcome, result)
        if result.finished:
            gone = {request.request_id for request in result.finished}
            self.running[:] = [request for request in self.running if request.request_id not in gone]
        self.discarded_tokens += result.surplus_tokens
        return result

    def _take_tokens(
        self, request: Request, verified: int, stale: bool, outcome: Outcome, result: Completion
    ) -> None:
        produced = 1
        if verified:
            produced = outcome.accepted.get(request.request_id, 1) if outcome.accepted else 1
            rejected = verified + 1 - produced
            if not stale:  # a rejection rolls back counts, not pages
                request.computed -= rejected
                request.placeholders = max(request.placeholders - rejected, 0)
        had_placeholders = request.placeholders > 0
        limit = min(request.end_tokens, self.limits.max_model_len)
        kept = min(produced, limit - request.known)
        stops = request.known + kept >= limit or request.request_id in outcome.stopped
        request.known += kept
        request.output_tokens += kept
        result.surplus_tokens += produced - kept
        if not stale:
            request.computed -= produced - kept
            request.placeholders = max(request.placeholders - produced, 0)
            if request.status is Status.RUNNING and (had_placeholders or self.limits.draft_tokens):
                settled = request.computed - request.in_flight
                if settled >= request.next_seal:
                    self.policy.seal(request, settled)
        result.listed.append((request, kept))
        if stops:
            result.finished.append(request)
            if request.status is not Status.RUNNING:
                self.waiting.remove(request)  # preempted while its last token was under way
            self._retire(request, Status.FINISHED)

    def _retire(self, request: Request, status: Status) -> None:
        still_loading = self._waiting.forget(request)
        request.status = status
        del self.requests[request.request_id]
        if still_loading:
            self._departures.leave_when_loaded(request)
        elif request.ledger is not None:
            self._departures.leave(request, finished=status is Status.FINISHED)
        self.num_finished += status is Status.FINISHED
        self._memory_moved = True
        self._news.append(Finish(request.request_id, request.output_tokens, status is Status.CANCELLED))

    def settle(self) -> None:
        """Bring the counters of all requests up to date (those of steady decodes lag)."""
        self._steady.settle_all()

    # -- quiet stretches --------------------------------------------------------------------------

    def quiet_steps(self) -> int:
        """How many further rounds only lengthen contexts, one plan being in flight. Changes nothing.

        A round makes a plan and brings the oldest one back. Holds as long as nothing is submitted, cancelled
        or notified meanwhile.
        """
        steady, notes = self._steady, self.notes
        if notes.scheduled or not len(steady) or len(steady) != len(self.running):
            return 0
        if self.waiting and notes.blocked_by not in ("gpu_blocks", "host_blocks", "max_num_seqs"):
            return 0
        if self.waiting and self._memory_moved:
            return 0  # the head may get in now
        if len(self._plans) != 1 or self._plans[0].requests or self._departures.late:
            return 0
        if self._news and not all(isinstance(action, Finish) for action in self._news):
            return 0
        if self.policy.actions or self.policy.looks_at_all():
            return 0
        if self.policy.grows_quietly:
            pages = self.policy.pool.num_free // len(self.running) - 1
            ends = steady.plans_until_end()
            if ends <= pages * self.limits.page_tokens:
                return ends
        else:
            pages = 0
        rounds = min([request.wake for request in self.running]) - steady.planned - 1
        return max(rounds, pages * self.limits.page_tokens, 0)

    def advance(self, rounds: int) -> list[tuple[int, Census]]:
        """Make so many plans and bring as many back, all as :meth:`quiet_steps` promised.

        Nobody sees these plans: what they would tell of pages taken and requests gone is dropped.

        Returns:
            The rounds (from 1) whose plans took pages, and the counts right after each.
        """
        steady, running = self._steady, self.running
        first, last = steady.planned, steady.planned + rounds
        changes: list[tuple[int, Census]] = []
        while (sequence := min([request.wake for request in running])) <= last:
            self._maker.skip(sequence - 1 - steady.planned)
            self.policy.begin_step()
            for request in running:
                if request.wake <= sequence and not self._running.stays_steady(request, []):
                    raise ProtocolError(f"{request!r} does not get through a quiet stretch")
            self._maker.skip(1)
            changes.append((sequence - first, self.policy.census(running)))
        self._maker.skip(last - steady.planned)
        self._news.clear()
        self.policy.actions.clear()
        return changes

    # -- laws -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Laws L1 to L6 over the policy's ledgers and the queues.

        Raises:
            LawBroken: with both sides.
        """
        self.settle()
        queued = [*self.running, *self.waiting]
        if len({request.request_id for request in queued}) != len(queued):
            raise LawBroken("a request stands in two queues")
        if len(queued) != len(self.requests):
            raise LawBroken(f"{len(queued)} requests queued, {len(self.requests)} alive")
        for request in queued:
            if request.known != request.prompt_tokens + request.output_tokens:
                raise LawBroken(f"{request!r}: known tokens are not prompt plus output")
            if request.known > request.end_tokens or request.in_flight < 0 or request.placeholders < 0:
                raise LawBroken(f"{request!r}: a token count is out of range")
            if request.status is Status.RUNNING and request.slot_tokens < request.computed:
                raise LawBroken(f"{request!r}: {request.slot_tokens} slots for the computed tokens")
        self.policy.check(self.running)
