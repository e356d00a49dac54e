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
    Outcome,
    Preempt,
    PrefillChunk,
    StepPlan,
    TransferUpdate,
)
from hisparsim.serving.policy import LateFree, ResidencyPolicy
from hisparsim.serving.request import Request, RequestSpec, Status

NEVER = 1 << 62
"""A token count that is never reached."""


class Wedged(RuntimeError):
    """Nothing can be scheduled, nothing is under way and nothing will arrive, yet requests are waiting."""


class ProtocolError(RuntimeError):
    """The driver broke the protocol (plans completed out of order, an unknown request, too many plans)."""


@dataclass(slots=True)
class Completion:
    """What came back with one step."""

    tokens: list[tuple[Request, int]] = field(default_factory=list)
    """Requests and how many output tokens each gained, in scheduling order."""
    finished: list[Request] = field(default_factory=list)
    surplus_tokens: int = 0
    """Tokens computed for requests that had finished already, discarded."""


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


@dataclass(slots=True)
class _InFlight:
    plan_id: int
    requests: list[Request]
    counts: list[int]
    drafts: list[int]
    yields: list[bool]


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
        self._plans: deque[_InFlight] = deque()
        self._next_plan_id = 0
        self._planned = 0
        self._completed = 0
        self._late: deque[tuple[int, LateFree]] = deque()
        self._loaded: set[int] = set()
        self._prefilling: dict[int, Request] = {}
        self._news: list[Action] = []

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
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._retire(request, Status.CANCELLED)

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        """Transfers moved on; may come at any time, also while idle."""
        self.policy.notify(updates)

    def loaded(self, request_id: int) -> None:
        """A load that a request waits for is complete: it may be scheduled."""
        self._loaded.add(request_id)

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

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
            f"that could free it: {self.policy.pool.num_free:,} of {self.policy.pool.num_usable:,} GPU blocks "
            "are free"
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
        self.policy.begin_step()
        chosen: list[Request] = []
        counts: list[int] = []
        budget = self._schedule_running(chosen, counts, self.limits.max_num_batched_tokens)
        num_running_chosen = len(chosen)
        if not self.notes.preemptions:
            self._admit_waiting(chosen, counts, budget)
        self.policy.end_step(
            [
                (request, min(request.computed + count, request.known))
                for request, count in zip(chosen, counts, strict=True)
            ]
        )
        self.notes.scheduled = tuple(chosen)
        if not chosen:
            return Idle(self.notes.blocked_by or "no request is ready")
        return self._commit(chosen, counts, num_running_chosen)

    def _schedule_running(self, chosen: list[Request], counts: list[int], budget: int) -> int:
        policy, running, limits = self.policy, self.running, self.limits
        lookahead, longest = limits.draft_tokens, limits.max_model_len - 1
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            if request.ledger.paused:  # type: ignore[union-attr]
                continue  # a transfer comes first
            computed, placeholders = request.computed, request.placeholders
            if placeholders and computed + 2 - placeholders >= request.end_tokens:
                continue  # every token that was asked for is under way
            count = request.known + request.drafts + placeholders - computed
            if count > budget:
                count = budget
            if count > longest - computed:
                count = longest - computed
            if count <= 0:
                continue
            needs = computed + count + lookahead > request.slot_tokens or request.ledger.wants_more  # type: ignore[union-attr]
            if needs and not self._extend_or_preempt(request, count):
                break
            known = min(computed + count, request.known)
            if known >= request.next_seal:
                policy.seal(request, known)
            chosen.append(request)
            counts.append(count)
            budget -= count
        return budget

    def _extend_or_preempt(self, request: Request, count: int) -> bool:
        """Give a running request its slots, taking memory from the newest requests if need be."""
        policy, notes = self.policy, self.notes
        while not policy.extend(request, count):
            if policy.may_wait():
                notes.waited = True
                return False
            victim = self.running[-1]
            if policy.defers_frees and victim.last_plan > self._completed:
                notes.victim_in_flight = True
                return False
            self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

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
        self.waiting.appendleft(request)
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
                notes.blocked_by = "token_budget"
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
            waiting.extendleft(reversed(skipped))

    def _try_admit(
        self, request: Request, budget: int, *, pads: bool, decodes_run: bool
    ) -> tuple[bool, int | None]:
        """Memory for a waiting request: (it must load first, tokens to compute now or None)."""
        policy = self.policy
        fresh = request.computed == 0
        hit = policy.lookup(request) if fresh else None
        start = hit.tokens if hit is not None else request.computed
        loads = hit is not None and hit.loaded_tokens > 0
        count = 0 if loads else min(request.known - start, budget)
        drafts = self.limits.draft_tokens
        padded = pads and request.known - start == 1 and not loads and (decodes_run or start > 0)
        if padded and start + drafts + 2 <= self.limits.max_model_len:
            count += drafts
            if count > budget:
                return False, None
        else:
            padded = False
        reserve = self.limits.watermark_blocks if self.running else 0
        if loads:
            reserve += sum(policy.remaining_blocks(other) for other in self._prefilling.values())
            reserve += self.limits.draft_tokens and 1 + 2 * self.limits.draft_tokens
        if hit is not None:
            if not policy.admit(request, hit, count, reserve=reserve):
                return False, None
            resumed = request.num_preemptions > 0
            self.prefix_hit_tokens += hit.tokens
            self._news.append(Admit(request.request_id, hit.tokens, hit.loaded_tokens, resumed))
            if request.hit_tokens is None:
                request.hit_tokens = hit.tokens + hit.loaded_tokens
        elif not policy.extend(request, count):
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

    def _finish_loading(self, request: Request) -> bool:
        if request.request_id not in self._loaded:
            return False
        self._loaded.discard(request.request_id)
        self.policy.loaded(request)
        self.policy.seal(request, request.computed)
        if request.computed == request.known:
            request.computed -= 1  # the last prompt token is always computed, its logits are needed
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _commit(self, chosen: list[Request], counts: list[int], num_running_chosen: int) -> StepPlan:
        """Advance the counters as if the step had run, and take its snapshot."""
        limits, notes, page = self.limits, self.notes, self.limits.page_tokens
        asynchronous = limits.async_depth > 1
        self._planned += 1
        yields: list[bool] = []
        drafts: list[int] = []
        decode_ids: list[int] = []
        contexts: list[int] = []
        readable: list[int] = []
        prefills: list[PrefillChunk] = []
        for position, (request, count) in enumerate(zip(chosen, counts, strict=True)):
            before, known = request.computed, request.known
            after = before + count
            verified = after - known - request.placeholders if request.drafts else 0
            request.computed = after
            request.in_flight += count
            request.last_plan = self._planned
            was_prefilling = request.prefilling or position >= num_running_chosen
            if was_prefilling and before >= request.prompt_tokens and count <= 1 + limits.draft_tokens:
                was_prefilling = False  # resumed, and only its last token is missing: a decode
            request.prefilling = after < known + request.placeholders
            verified = max(verified, 0)
            if request.prefilling:
                request.drafts = 0
            else:
                if asynchronous:
                    request.placeholders += 1 + verified
                request.drafts = limits.draft_tokens
                if self._prefilling:
                    self._prefilling.pop(request.request_id, None)
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
                decode_ids.append(request.request_id)
                contexts.append(after)
                readable.append(request.ledger.num_readable)  # type: ignore[union-attr]
        plan_id = self._next_plan_id
        self._next_plan_id += 1
        self._plans.append(_InFlight(plan_id, chosen, counts, drafts, yields))
        context_array = np.array(contexts, np.int64)
        pages_array = (context_array + (page - 1)) // page
        actions = (*self._news, *self.policy.actions)
        self._news.clear()
        self.policy.actions.clear()
        return StepPlan(
            plan_id=plan_id,
            decodes=DecodeBatch(
                tuple(decode_ids),
                context_array,
                pages_array,
                np.minimum(np.array(readable, np.int64), pages_array),
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
        plan = self._plans.popleft()
        self._completed += 1
        while self._late and self._late[0][0] <= self._completed:
            self._late.popleft()[1]()
        result = Completion()
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
        result.tokens.append((request, kept))
        if stops:
            result.finished.append(request)
            self._retire(request, Status.FINISHED)

    def _retire(self, request: Request, status: Status) -> None:
        held = request.ledger is not None
        request.status = status
        self._prefilling.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        del self.requests[request.request_id]
        if held:
            self._leave(request, finished=status is Status.FINISHED)
        self.num_finished += status is Status.FINISHED
        self._news.append(Finish(request.request_id, request.output_tokens, status is Status.CANCELLED))

    def _leave(self, request: Request, *, finished: bool) -> None:
        self._prefilling.pop(request.request_id, None)
        in_flight = self.policy.defers_frees and request.last_plan > self._completed
        late = self.policy.leave(request, finished=finished, in_flight=in_flight)
        if late is not None:
            self._late.append((self._planned, late))
        request.ledger = None
        request.slot_tokens = 0
        request.next_seal = 0

    # -- laws -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Laws L1 to L6 over the policy's ledgers and the queues.

        Raises:
            LawBroken: with both sides.
        """
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
