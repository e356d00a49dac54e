"""The running queue: what each running request computes in the next plan, and who is preempted for it.

Steady decodes are implied until something may happen to them, so that a pass costs what the others cost. As
soon as one does not go as usual, all are listed and taken strictly one after another.
"""

from __future__ import annotations

from hisparsim.serving.departures import Departures
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Action, Preempt
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.serving.progress import StepNotes, Wedged
from hisparsim.serving.request import Request, Status
from hisparsim.serving.steady import SteadyDecodes
from hisparsim.serving.waiting import WaitingQueue

MAX_TIMES_GIVEN_UP = 3
"""A request that runs alone and preempts itself more often than this at the same token will never get on."""


class RunningQueue:
    """Running requests in order of admission."""

    def __init__(
        self,
        limits: ServingLimits,
        policy: ResidencyPolicy,
        steady: SteadyDecodes,
        requests: list[Request],
        waiting: WaitingQueue,
        departures: Departures,
        news: list[Action],
    ) -> None:
        self.requests = requests
        self.num_preemptions = 0
        self._limits = limits
        self._policy = policy
        self._steady = steady
        self._waiting = waiting
        self._departures = departures
        self._news = news

    # -- a pass -----------------------------------------------------------------------------------

    def schedule(
        self, chosen: list[Request], counts: list[int], woken: list[Request], notes: StepNotes
    ) -> int:
        """Change: fill the lists for this plan; returns the tokens left of its budget.

        ``woken`` gets the steady requests that took something and stay steady.
        """
        steady, sequence = self._steady, self._steady.planned + 1
        budget = self._limits.max_num_batched_tokens - len(steady)
        prefilling = False
        for request in self.requests:
            if request.wake > sequence:
                if prefilling or budget < 0:
                    break  # a chunk that comes before it in the order takes its share first
                continue
            if request.steady:
                if prefilling:
                    break
                stays = self.stays_steady(request, woken)
                if stays is None:
                    break
                if stays:
                    continue
                steady.leave(request)
                budget += 1
            count = self._tokens_wanted(request, budget)
            if count:
                if self._needs_memory(request, count) and not self._policy.extend(request, count):
                    break
                self._seal(request, min(request.computed + count, request.known))
                prefilling = prefilling or request.prefilling
                chosen.append(request)
                counts.append(count)
                budget -= count
        else:
            return budget
        # Something does not go as usual: list everybody, and take them strictly one after another.
        steady.leave_all()
        chosen.clear()
        counts.clear()
        woken.clear()
        return self._schedule_one_by_one(chosen, counts, notes)

    def _schedule_one_by_one(self, chosen: list[Request], counts: list[int], notes: StepNotes) -> int:
        budget = self._limits.max_num_batched_tokens
        running = self.requests
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            count = self._tokens_wanted(request, budget)
            if not count:
                continue
            if self._needs_memory(request, count) and not self._extend_or_preempt(request, count, notes):
                break
            self._seal(request, min(request.computed + count, request.known))
            chosen.append(request)
            counts.append(count)
            budget -= count
        return budget

    def _tokens_wanted(self, request: Request, budget: int) -> int:
        """Query: tokens that a listed request would compute in this plan, 0 = none."""
        if request.ledger.paused:  # type: ignore[union-attr]
            return 0  # a transfer comes first
        computed, placeholders = request.computed, request.placeholders
        if placeholders and computed + 2 - placeholders >= request.end_tokens:
            return 0  # every token that was asked for is under way
        count = request.known + request.drafts + placeholders - computed
        return max(min(count, budget, self._limits.max_model_len - 1 - computed), 0)

    def _needs_memory(self, request: Request, count: int) -> bool:
        slots = request.computed + count + self._limits.draft_tokens
        return slots > request.slot_tokens or request.ledger.wants_more  # type: ignore[union-attr]

    def _seal(self, request: Request, known: int) -> None:
        if known >= request.next_seal:
            self._policy.seal(request, known)

    def stays_steady(self, request: Request, woken: list[Request]) -> bool | None:
        """Change: a steady request's number has come: do what it needs.

        False where it has to be listed from now on, None where it does not get its memory.
        """
        steady, sequence = self._steady, self._steady.planned + 1
        steady.settle(request)
        quiet = steady.quiet_until(self._policy, request)
        if request.computed >= quiet:
            if request.computed >= steady.end(request) or request.ledger.paused:  # type: ignore[union-attr]
                return False
            if self._needs_memory(request, 1) and not self._policy.extend(request, 1):
                return None
            self._seal(request, min(request.computed + 1, request.known))
            woken.append(request)
            quiet = steady.quiet_until(self._policy, request)
        request.wake = max(sequence + quiet - request.computed, sequence + 1)
        return True

    def for_end_of_step(
        self, chosen: list[Request], counts: list[int], woken: list[Request]
    ) -> list[tuple[Request, int]]:
        """Change (counters of steady requests): whom the policy looks at once all are scheduled, in order."""
        if len(self._steady) and self._policy.looks_at_all():
            self._steady.settle_all()
            by_id = dict(zip((request.request_id for request in chosen), counts, strict=True))
            everybody = (
                (request, 1 if request.steady else by_id.get(request.request_id, 0))
                for request in self.requests
            )
            return [(r, min(r.computed + count, r.known)) for r, count in everybody if count]
        pairs = [(r, min(r.computed + count, r.known)) for r, count in zip(chosen, counts, strict=True)]
        if not woken:
            return pairs
        late = [(request, min(request.computed + 1, request.known)) for request in woken]
        if not pairs:
            return late
        place = {id(request): index for index, request in enumerate(self.requests)}
        return sorted([*late, *pairs], key=lambda pair: place[id(pair[0])])

    # -- preemption -------------------------------------------------------------------------------

    def _extend_or_preempt(self, request: Request, count: int, notes: StepNotes) -> bool:
        """Give a running request its slots, taking memory from the newest requests if need be."""
        policy = self._policy
        while not policy.extend(request, count):
            if policy.may_wait():
                notes.waited = True
                return False
            victim = self.requests[-1]
            if policy.defers_frees and victim.last_plan > self._steady.completed:
                notes.victim_in_flight = True
                return False
            self.requests.pop()
            if victim is request:
                self._check_progress(request)
            self._preempt(victim)
            notes.preemptions += 1
            if victim is request:
                return False
        return True

    def _check_progress(self, request: Request) -> None:
        """Raise Wedged where a request gives itself up again and again though nobody else holds memory."""
        if self.requests or self._departures.late:
            return
        if any(other.ledger is not None for other in self._waiting.requests):
            return
        if request.computed > request.given_up_at:
            request.given_up_at, request.times_given_up = request.computed, 0
        request.times_given_up += 1
        if request.times_given_up > MAX_TIMES_GIVEN_UP:
            pool = self._policy.pool
            raise Wedged(
                f"request {request.request_id} ({request.known:,} tokens) runs alone and gets no memory "
                f"beyond its token {request.computed:,}: {pool.num_free:,} of {pool.num_usable:,} GPU blocks "
                "are free; give KV more memory (kv.gpu_kv_gib), or lower kv.hot_rows or "
                "scheduler.max_num_batched_tokens"
            )

    def _preempt(self, request: Request) -> None:
        self._news.append(Preempt(request.request_id, request.computed))
        self._departures.leave(request, finished=False)
        request.status = Status.PREEMPTED
        request.computed = 0
        request.drafts = 0
        request.prefilling = True
        request.stale = request.in_flight
        request.placeholders = 0
        request.num_preemptions += 1
        self._waiting.put_back(request)
        self.num_preemptions += 1
