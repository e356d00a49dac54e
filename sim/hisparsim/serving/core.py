"""The serving core: continuous batching with chunked prefill, first come first served, no clock.

``plan()`` decides the next step and changes the ledgers; ``complete()`` brings a step's tokens back. With
``async_depth`` 2 (vLLM's asynchronous scheduling) a step is planned while the one before it runs, so the
scheduler counts tokens that it has not seen. The rules are those of vLLM 0.33's V1 scheduler, described in
docs/conformance.md; memory is the policy's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import (
    Action,
    Admit,
    DecodeBatch,
    Finish,
    Idle,
    Load,
    Outcome,
    Preempt,
    PrefillChunk,
    Restore,
    StepPlan,
    TransferUpdate,
)
from hisparsim.serving.policy import Census, LateFree, ResidencyPolicy
from hisparsim.serving.request import Request, RequestSpec, Status
from hisparsim.serving.steady import PlanInFlight, SteadyDecodes

NEVER = 1 << 62
"""A token count that is never reached."""
MAX_TIMES_GIVEN_UP = 3
"""A request that runs alone and preempts itself more often than this at the same token will never get on."""


class Wedged(RuntimeError):
    """Nothing can be scheduled, nothing is under way and nothing will arrive, yet requests are waiting."""


class ProtocolError(RuntimeError):
    """The driver broke the protocol (plans completed out of order, an unknown request, too many plans)."""


@dataclass(slots=True)
class Completion:
    """What came back with one step."""

    sequence: int = 0
    """Number of the step among those that computed something, from 1."""
    steady: tuple[Request, ...] = ()
    """Requests that gained one token each, as in the step before; their counters lag (``settle``)."""
    listed: list[tuple[Request, int]] = field(default_factory=list)
    """The other requests that gained tokens, and how many."""
    finished: list[Request] = field(default_factory=list)
    surplus_tokens: int = 0
    """Tokens computed for requests that had finished already, discarded."""

    @property
    def tokens(self) -> list[tuple[Request, int]]:
        """All requests that gained tokens, and how many."""
        return [*((request, 1) for request in self.steady), *self.listed]


@dataclass(slots=True)
class StepNotes:
    """Why the last plan looks as it does; counters of one ``plan()`` call."""

    waited: bool = False
    """An allocation failed and the scheduler waited for a transfer instead of preempting."""
    victim_in_flight: bool = False
    """The request to preempt was still being computed, so nothing was done in this step."""
    preemptions: int = 0
    admissions: int = 0
    blocked_by: str | None = None
    """What kept the head of the queue out: gpu_blocks, host_blocks, max_num_seqs, token_budget or loading."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    scheduled: tuple[Request, ...] = ()
    """Requests that the plan lists one by one."""
    steady: tuple[Request, ...] = ()
    """Requests that decode one token as in the plan before."""


class ServingCore:
    """Queues, token counts and the order of things; see DESIGN of the protocol in docs/architecture.md."""

    def __init__(self, limits: ServingLimits, policy: ResidencyPolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[int, Request] = {}
        self.notes = StepNotes()
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self.num_finished = 0
        self.discarded_tokens = 0
        self._plans: deque[PlanInFlight] = deque()
        self._next_plan_id = 0
        self._ends_steps = type(policy).end_step is not ResidencyPolicy.end_step
        self._steady = SteadyDecodes(asynchronous=limits.async_depth > 1)
        self._late: deque[tuple[int, LateFree]] = deque()
        self._loaded: set[int] = set()
        self._abandoned: dict[int, Request] = {}  # cancelled while a load still writes their blocks
        self._prefilling: dict[int, Request] = {}
        self._news: list[Action] = []
        self._memory_moved = False  # since the last plan, by transfers or late frees

    # -- requests come and go ---------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> Request:
        """Queue a request.

        Raises:
            ProtocolError: its id is in use.
            LimitsError: never here; callers ask :meth:`refusal` first.
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
            self._steady.leave(request, self._plans)
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
        abandoned = self._abandoned.pop(request_id, None)
        if abandoned is not None:
            self._leave(abandoned, finished=False)
            return
        request = self.requests.get(request_id)
        if request is None or request.status is not Status.LOADING:
            raise ProtocolError(f"request {request_id} does not wait for a load")
        self._loaded.add(request_id)
        self.policy.loaded(request)

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

    @property
    def num_completed(self) -> int:
        """Plans that have come back."""
        return self._steady.completed

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
        self.notes = StepNotes()
        self._memory_moved = False
        self.policy.begin_step()
        chosen: list[Request] = []
        counts: list[int] = []
        woken: list[Request] = []
        budget = self._schedule_running(chosen, counts, woken)
        num_running_chosen = len(chosen)
        if not self.notes.preemptions:
            self._admit_waiting(chosen, counts, budget)
        if self._ends_steps:
            self.policy.end_step(self._for_end_of_step(chosen, counts, woken))
        self.notes.scheduled = tuple(chosen)
        self.notes.steady = self._steady.members
        starts_load = any(isinstance(action, Load | Restore) for action in self.policy.actions)
        if not chosen and not self.notes.steady and not starts_load:
            return Idle(self.notes.blocked_by or "no request is ready")
        return self._commit(chosen, counts, num_running_chosen)

    def _schedule_running(self, chosen: list[Request], counts: list[int], woken: list[Request]) -> int:
        """Fill the lists for this plan and return the tokens left of its budget."""
        steady, sequence = self._steady, self._steady.planned + 1
        budget = self.limits.max_num_batched_tokens - len(steady)
        prefilling = False
        for request in self.running:
            if request.wake > sequence:
                if prefilling or budget < 0:
                    break  # a chunk that comes before it in the order takes its share first
                continue
            if request.steady:
                if prefilling:
                    break
                stays = self._stays_steady(request, woken)
                if stays is None:
                    break
                if stays:
                    continue
                steady.leave(request, self._plans)
                budget += 1
            count = self._tokens_wanted(request, budget)
            if count:
                if self._needs_memory(request, count) and not self.policy.extend(request, count):
                    break
                self._seal(request, min(request.computed + count, request.known))
                prefilling = prefilling or request.prefilling
                chosen.append(request)
                counts.append(count)
                budget -= count
        else:
            return budget
        # Something does not go as usual: list everybody, and take them strictly one after another.
        steady.leave_all(self._plans)
        chosen.clear()
        counts.clear()
        woken.clear()
        return self._schedule_one_by_one(chosen, counts)

    def _schedule_one_by_one(self, chosen: list[Request], counts: list[int]) -> int:
        budget = self.limits.max_num_batched_tokens
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            count = self._tokens_wanted(request, budget)
            if not count:
                continue
            if self._needs_memory(request, count) and not self._extend_or_preempt(request, count):
                break
            self._seal(request, min(request.computed + count, request.known))
            chosen.append(request)
            counts.append(count)
            budget -= count
        return budget

    def _tokens_wanted(self, request: Request, budget: int) -> int:
        """Tokens that a listed request would compute in this plan, 0 = none. Changes nothing."""
        if request.ledger.paused:  # type: ignore[union-attr]
            return 0  # a transfer comes first
        computed, placeholders = request.computed, request.placeholders
        if placeholders and computed + 2 - placeholders >= request.end_tokens:
            return 0  # every token that was asked for is under way
        count = request.known + request.drafts + placeholders - computed
        return max(min(count, budget, self.limits.max_model_len - 1 - computed), 0)

    def _needs_memory(self, request: Request, count: int) -> bool:
        slots = request.computed + count + self.limits.draft_tokens
        return slots > request.slot_tokens or request.ledger.wants_more  # type: ignore[union-attr]

    def _seal(self, request: Request, known: int) -> None:
        if known >= request.next_seal:
            self.policy.seal(request, known)

    def _quiet_until(self, request: Request) -> int:
        """Computed tokens below which a steady request needs nothing and cannot finish."""
        return min(self.policy.quiet_until(request), request.end_tokens - 2)

    def _stays_steady(self, request: Request, woken: list[Request]) -> bool | None:
        """A steady request's number has come: do what it needs.

        False where it has to be listed from now on, None where it does not get its memory.
        """
        steady, sequence = self._steady, self._steady.planned + 1
        steady.settle(request)
        quiet = self._quiet_until(request)
        if request.computed >= quiet:
            if request.computed >= request.end_tokens - 2 or request.ledger.paused:  # type: ignore[union-attr]
                return False
            if self._needs_memory(request, 1) and not self.policy.extend(request, 1):
                return None
            self._seal(request, min(request.computed + 1, request.known))
            woken.append(request)
            quiet = self._quiet_until(request)
        request.wake = max(sequence + quiet - request.computed, sequence + 1)
        return True

    def _for_end_of_step(
        self, chosen: list[Request], counts: list[int], woken: list[Request]
    ) -> list[tuple[Request, int]]:
        """The scheduled requests that the policy looks at, in the order of the running queue."""
        if len(self._steady) and self.policy.looks_at_all():
            self._steady.settle_all()
            by_id = dict(zip((request.request_id for request in chosen), counts, strict=True))
            everybody = (
                (request, 1 if request.steady else by_id.get(request.request_id, 0))
                for request in self.running
            )
            return [(r, min(r.computed + count, r.known)) for r, count in everybody if count]
        pairs = [(r, min(r.computed + count, r.known)) for r, count in zip(chosen, counts, strict=True)]
        if not woken:
            return pairs
        late = [(request, min(request.computed + 1, request.known)) for request in woken]
        if not pairs:
            return late
        place = {id(request): index for index, request in enumerate(self.running)}
        return sorted([*late, *pairs], key=lambda pair: place[id(pair[0])])

    def _extend_or_preempt(self, request: Request, count: int) -> bool:
        """Give a running request its slots, taking memory from the newest requests if need be."""
        policy, notes = self.policy, self.notes
        while not policy.extend(request, count):
            if policy.may_wait():
                notes.waited = True
                return False
            victim = self.running[-1]
            if policy.defers_frees and victim.last_plan > self._steady.completed:
                notes.victim_in_flight = True
                return False
            self.running.pop()
            if victim is request:
                self._check_progress(request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _check_progress(self, request: Request) -> None:
        """Raise Wedged where a request gives itself up again and again though nobody else holds memory."""
        if self.running or self._late or any(other.ledger is not None for other in self.waiting):
            return
        if request.computed > request.given_up_at:
            request.given_up_at, request.times_given_up = request.computed, 0
        request.times_given_up += 1
        if request.times_given_up > MAX_TIMES_GIVEN_UP:
            raise Wedged(
                f"request {request.request_id} ({request.known:,} tokens) runs alone and gets no memory "
                f"beyond its token {request.computed:,}: {self.policy.pool.num_free:,} of "
                f"{self.policy.pool.num_usable:,} GPU blocks are free; give KV more memory (kv.gpu_kv_gib), "
                "or lower kv.hot_rows or scheduler.max_num_batched_tokens"
            )

    def _preempt(self, request: Request) -> None:
        self._news.append(Preempt(request.request_id, request.computed))
        self._leave(request, finished=False)
        request.status = Status.PREEMPTED
        request.computed = 0
        request.drafts = 0
        request.prefilling = True
        request.stale = request.in_flight
        request.placeholders = 0
        request.num_preemptions += 1
        holders = 0
        while holders < len(self.waiting) and self.waiting[holders].ledger is not None:
            holders += 1
        self.waiting.insert(holders, request)
        self.num_preemptions += 1
        self.notes.preemptions += 1

    def _admit_waiting(self, chosen: list[Request], counts: list[int], budget: int) -> None:
        notes, limits, waiting = self.notes, self.limits, self.waiting
        skipped: list[Request] = []
        # A request of which only one token is missing joins a batch of decodes with drafts of no content, so
        # that the batch stays uniform.
        pads = limits.draft_tokens > 0 and not any(request.prefilling for request in chosen)
        decodes_run = bool(chosen)
        while waiting:
            if budget <= 0:
                notes.blocked_by = self.policy.lacks(waiting[0]) or "token_budget"
                break
            if len(self.running) >= limits.max_num_seqs:
                notes.blocked_by = "max_num_seqs"
                break
            request = waiting[0]
            if request.status is Status.LOADING and not self._finish_loading(request):
                skipped.append(waiting.popleft())
                continue
            if request.stale:
                skipped.append(waiting.popleft())  # output of before the preemption is still to come
                continue
            loading, count = self._try_admit(request, budget, pads=pads, decodes_run=decodes_run)
            if count is None:
                notes.blocked_by = self.policy.blocked_by or "token_budget"
                break
            waiting.popleft()
            if loading:
                skipped.append(request)
                continue
            self.running.append(request)
            request.status = Status.RUNNING
            chosen.append(request)
            counts.append(count)
            budget -= count
        if skipped:
            notes.blocked_by = notes.blocked_by or "loading"
            # Requests that hold memory stand in front: they must never wait behind one that gets none.
            waiting.extendleft(request for request in reversed(skipped) if request.ledger is None)
            waiting.extendleft(request for request in reversed(skipped) if request.ledger is not None)

    def _try_admit(
        self, request: Request, budget: int, *, pads: bool, decodes_run: bool
    ) -> tuple[bool, int | None]:
        """Memory for a waiting request: (it must load first, tokens to compute now or None)."""
        policy, limits = self.policy, self.limits
        fresh = request.computed == 0
        hit = policy.lookup(request) if fresh else None
        start = hit.tokens if hit is not None else request.computed
        loads = hit is not None and hit.loaded_tokens > 0
        count = 0 if loads else min(request.known - start, budget)
        drafts = limits.draft_tokens
        padded = pads and request.known - start == 1 and not loads and (decodes_run or start > 0)
        if padded and start + drafts + 2 <= limits.max_model_len:
            count += drafts
            if count > budget:
                return False, None
        else:
            padded = False
        reserve = limits.watermark_blocks if self.running else 0
        if hit is not None:
            if loads:
                promised = self._promised_blocks()
                admitted = policy.admit_loading(request, hit, reserve=reserve, promised=promised)
            else:
                admitted = policy.admit(request, hit, count, reserve=reserve)
            if not admitted:
                return False, None
            resumed = request.num_preemptions > 0
            self.prefix_hit_tokens += hit.tokens
            self._news.append(Admit(request.request_id, hit.tokens, hit.loaded_tokens, resumed))
            if request.hit_tokens is None:
                request.hit_tokens = hit.tokens + hit.loaded_tokens
        elif not policy.resume(request, count, reserve=reserve):
            return False, None
        request.computed = start
        request.drafts = drafts if padded else 0
        if loads:
            assert hit is not None
            request.status = Status.LOADING
            request.computed = start + hit.loaded_tokens
            self._prefilling[request.request_id] = request
            return True, 0
        known = min(start + count, request.known)
        if known >= request.next_seal:
            policy.seal(request, known)
        self.notes.admissions += 1
        if start + count < request.known:
            self._prefilling[request.request_id] = request
        return False, count

    def _promised_blocks(self) -> int:
        """Blocks that prefills under way still need, and one step of drafts of the request to admit."""
        limits, policy = self.limits, self.policy
        drafts = limits.draft_tokens
        further = 1 + 2 * drafts if drafts else 0
        return policy.draft_blocks() + sum(
            policy.missing_blocks(other, min(other.known, limits.max_model_len) + further)
            for other in self._prefilling.values()
        )

    def _finish_loading(self, request: Request) -> bool:
        if request.request_id not in self._loaded:
            return False
        self._loaded.discard(request.request_id)
        self.policy.seal(request, request.computed)
        if request.computed == request.known:
            request.computed -= 1  # the last prompt token is always computed, its logits are needed
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _commit(self, chosen: list[Request], counts: list[int], num_running_chosen: int) -> StepPlan:
        """Advance the counters as if the step had run, and take its snapshot."""
        limits, notes, page, steady = self.limits, self.notes, self.limits.page_tokens, self._steady
        asynchronous = limits.async_depth > 1
        implied = notes.steady
        steady.planned += bool(chosen or implied)  # a plan without tokens writes nothing
        decode_ids, contexts = steady.ids, steady.contexts()
        listed_ids: list[int] = []
        listed_contexts: list[int] = []
        listed_decodes: list[Request] = []
        yields: list[bool] = []
        drafts: list[int] = []
        prefills: list[PrefillChunk] = []
        joining: list[Request] = []
        for position, (request, count) in enumerate(zip(chosen, counts, strict=True)):
            before, known = request.computed, request.known
            after = before + count
            verified = max(after - known - request.placeholders, 0) if request.drafts else 0
            request.computed = after
            request.in_flight += count
            request.last_plan = steady.planned
            was_prefilling = request.prefilling or position >= num_running_chosen
            if was_prefilling and before >= request.prompt_tokens and count <= 1 + limits.draft_tokens:
                was_prefilling = False  # resumed, and only its last token is missing: a decode
            request.prefilling = after < known + request.placeholders
            if request.prefilling:
                request.drafts = 0
            else:
                if asynchronous:
                    request.placeholders += 1 + verified
                request.drafts = limits.draft_tokens
                if self._prefilling:
                    self._prefilling.pop(request.request_id, None)
                if not limits.draft_tokens:
                    joining.append(request)
            yields.append(not request.prefilling)
            drafts.append(verified)
            if was_prefilling:
                notes.prefill_tokens += count
                ledger = request.ledger
                staged = ledger.num_pages - ledger.num_readable  # type: ignore[union-attr]
                prefills.append(
                    PrefillChunk(request.request_id, before, count, not request.prefilling, staged)
                )
            else:
                notes.decode_tokens += count
                listed_ids.append(request.request_id)
                listed_contexts.append(after)
                listed_decodes.append(request)
        notes.decode_tokens += len(implied)
        plan_id = self._next_plan_id
        self._next_plan_id += 1
        self._plans.append(PlanInFlight(plan_id, steady.planned, chosen, counts, drafts, yields, implied))
        if listed_ids:
            decode_ids = (*decode_ids, *listed_ids)
            contexts = np.concatenate([contexts, np.array(listed_contexts, np.int64)])
        pages = (contexts + (page - 1)) // page
        resident = pages
        if self.policy.uses_groups:
            readable = [r.ledger.num_readable for r in (*implied, *listed_decodes)]  # type: ignore[union-attr]
            resident = np.minimum(np.array(readable, np.int64), pages)
        for request in joining:
            quiet = self._quiet_until(request)
            if request.computed + 1 < quiet:
                steady.join(request, steady.planned + 1 + quiet - request.computed)
        actions: tuple[Action, ...] = ()
        if self._news or self.policy.actions:
            actions = (*self._news, *self.policy.actions)
            self._news.clear()
            self.policy.actions.clear()
        return StepPlan(
            plan_id=plan_id,
            decodes=DecodeBatch(
                decode_ids,
                contexts,
                pages,
                resident,
                1 + limits.draft_tokens,
                limits.hot_rows if self.policy.uses_groups else 0,
            ),
            prefills=tuple(prefills),
            actions=actions,
            mirrored_tokens=notes.prefill_tokens * self.policy.mirrors_prefill
            + notes.decode_tokens * self.policy.mirrors_decode,
            graph_bucket=None if prefills else graph_bucket(len(decode_ids)),
        )

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
                    self._steady.leave(request, self._plans)
        plan = self._plans.popleft()
        self._steady.completed += bool(plan.requests or plan.steady)
        while self._late and self._late[0][0] <= self._steady.completed:
            self._late.popleft()[1]()
            self._memory_moved = True
        result = Completion(plan.sequence, plan.steady_members())
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
            self.running = [request for request in self.running if request.request_id not in gone]
            if any(request.status is Status.PREEMPTED for request in self.waiting):
                self.waiting = deque(r for r in self.waiting if r.request_id not in gone)
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
            self._retire(request, Status.FINISHED)

    def _retire(self, request: Request, status: Status) -> None:
        loading = request.status is Status.LOADING and request.request_id not in self._loaded
        request.status = status
        self._prefilling.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        del self.requests[request.request_id]
        if loading:
            self._abandoned[request.request_id] = request
        elif request.ledger is not None:
            self._leave(request, finished=status is Status.FINISHED)
        self.num_finished += status is Status.FINISHED
        self._news.append(Finish(request.request_id, request.output_tokens, status is Status.CANCELLED))

    def _leave(self, request: Request, *, finished: bool) -> None:
        self._prefilling.pop(request.request_id, None)
        in_flight = self.policy.defers_frees and request.last_plan > self._steady.completed
        late = self.policy.leave(request, finished=finished, in_flight=in_flight)
        if late is not None:
            self._late.append((self._steady.planned, late))
        request.ledger = None
        request.slot_tokens = 0
        request.next_seal = 0

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
        if not len(steady) or len(steady) != len(self.running):
            return 0
        if self.waiting and notes.blocked_by not in ("gpu_blocks", "host_blocks", "max_num_seqs"):
            return 0
        if self.waiting and self._memory_moved:
            return 0  # the head may get in now
        if len(self._plans) != 1 or self._late or self._news:
            return 0
        if self.policy.actions or self.policy.looks_at_all():
            return 0
        if any(plan.requests for plan in self._plans) or notes.scheduled:
            return 0
        planned = steady.planned
        rounds = min(request.wake for request in self.running) - planned - 1
        if self.policy.grows_quietly:
            ends = min(r.end_tokens - 2 - r.computed + r.base_planned for r in self.running) - planned
            page = self.limits.page_tokens
            pages = self.policy.pool.num_free // len(self.running) - 1
            rounds = max(rounds, min(ends, pages * page))
        return max(rounds, 0)

    def advance(self, rounds: int) -> list[tuple[int, Census]]:
        """Make so many plans and bring as many back, all as :meth:`quiet_steps` promised.

        Returns:
            The rounds (from 1) whose plans took pages, and the counts right after each.
        """
        steady, running = self._steady, self.running
        first, last = steady.planned, steady.planned + rounds
        changes: list[tuple[int, Census]] = []
        while (sequence := min(request.wake for request in running)) <= last:
            self._skip(sequence - 1 - steady.planned)
            self.policy.begin_step()
            for request in running:
                if request.wake <= sequence and not self._stays_steady(request, []):
                    raise ProtocolError(f"{request!r} does not get through a quiet stretch")
            self._skip(1)
            changes.append((sequence - first, self.policy.census(running)))
        self._skip(last - steady.planned)
        return changes

    def _skip(self, rounds: int) -> None:
        self._steady.planned += rounds
        self._steady.completed += rounds
        self._next_plan_id += rounds
        for plan in self._plans:
            plan.plan_id += rounds
            plan.sequence += rounds

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


def graph_bucket(batch: int) -> int:
    """Batch size of the CUDA graph that serves ``batch`` decodes (vLLM's default capture sizes)."""
    if batch <= 2:
        return max(batch, 1)
    if batch <= 8:
        return (batch + 3) // 4 * 4
    if batch <= 256:
        return (batch + 7) // 8 * 8
    return (batch + 15) // 16 * 16
