"""The waiting queue: who comes next, whose prefix is being loaded, and who is let in.

Requests are admitted in order; the first that does not fit keeps out all behind it. Requests that already
hold memory (their load is under way or complete) stand in front of all others.
"""

from __future__ import annotations

from collections import deque

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Action, Admit
from hisparsim.serving.policy import PrefixHit, ResidencyPolicy
from hisparsim.serving.progress import StepNotes
from hisparsim.serving.request import Request, Status


class WaitingQueue:
    """Requests that do not run: new, loading or preempted ones."""

    def __init__(
        self, limits: ServingLimits, policy: ResidencyPolicy, running: list[Request], news: list[Action]
    ) -> None:
        """Who is admitted joins ``running``; what the next plan has to tell of it joins ``news``."""
        self.requests: deque[Request] = deque()
        self.prefilling: dict[int, Request] = {}
        """Requests that hold memory and whose prefill is not planned to its end."""
        self.prefix_hit_tokens = 0
        """Found in caches by all admissions, loaded ones left out."""
        self._limits = limits
        self._policy = policy
        self._running = running
        self._news = news
        self._loaded: set[int] = set()

    # -- requests come and go ---------------------------------------------------------------------

    def put_back(self, request: Request) -> None:
        """Change: a preempted request waits in front, behind those that hold memory."""
        self.prefilling.pop(request.request_id, None)
        holders = 0
        while holders < len(self.requests) and self.requests[holders].ledger is not None:
            holders += 1
        self.requests.insert(holders, request)

    def loaded(self, request: Request) -> None:
        """Change: the load that a request waits for is complete."""
        self._loaded.add(request.request_id)
        self._policy.loaded(request)

    def forget(self, request: Request) -> bool:
        """Change: a request left the engine; says whether a load still writes its blocks."""
        still_loading = request.status is Status.LOADING and request.request_id not in self._loaded
        self.prefilling.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        return still_loading

    # -- admission --------------------------------------------------------------------------------

    def admit(self, chosen: list[Request], counts: list[int], budget: int, notes: StepNotes) -> None:
        """Change: let in whom memory and what is left of the plan's token budget allow."""
        limits, waiting = self._limits, self.requests
        skipped: list[Request] = []
        # A request of which only one token is missing joins a batch of decodes with drafts of no content, so
        # that the batch stays uniform.
        pads = limits.draft_tokens > 0 and not any(request.prefilling for request in chosen)
        decodes_run = bool(chosen)
        while waiting:
            if budget <= 0:
                notes.blocked_by = self._policy.lacks(waiting[0]) or "token_budget"
                break
            if len(self._running) >= limits.max_num_seqs:
                notes.blocked_by = "max_num_seqs"
                break
            request = waiting[0]
            if request.status is Status.LOADING and not self._finish_loading(request):
                skipped.append(waiting.popleft())
                continue
            if request.stale:
                skipped.append(waiting.popleft())  # output of before the preemption is still to come
                continue
            count = self._try_admit(request, budget, notes, pads=pads, decodes_run=decodes_run)
            if count is None:
                notes.blocked_by = self._policy.blocked_by or "token_budget"
                break
            waiting.popleft()
            if request.status is Status.LOADING:
                skipped.append(request)
                continue
            self._running.append(request)
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
        self, request: Request, budget: int, notes: StepNotes, *, pads: bool, decodes_run: bool
    ) -> int | None:
        """Memory for a waiting request: tokens to compute now (0 while it loads), None = it gets none."""
        limits = self._limits
        hit = self._policy.lookup(request) if request.computed == 0 else None
        start = hit.tokens if hit is not None else request.computed
        loads = hit is not None and hit.loaded_tokens > 0
        count = 0 if loads else min(request.known - start, budget)
        drafts = limits.draft_tokens
        padded = pads and request.known - start == 1 and not loads and (decodes_run or start > 0)
        if padded and start + drafts + 2 <= limits.max_model_len:
            count += drafts
            if count > budget:
                return None
        else:
            padded = False
        reserve = limits.watermark_blocks if self._running else 0
        if hit is not None:
            if not self._take_memory(request, hit, count, reserve):
                return None
        elif not self._policy.resume(request, count, reserve=reserve):
            return None
        request.computed = start
        request.drafts = drafts if padded else 0
        if hit is not None and loads:
            request.status = Status.LOADING
            request.computed = start + hit.loaded_tokens
            self.prefilling[request.request_id] = request
            return 0
        known = min(start + count, request.known)
        if known >= request.next_seal:
            self._policy.seal(request, known)
        notes.admissions += 1
        if start + count < request.known:
            self.prefilling[request.request_id] = request
        return count

    def _take_memory(self, request: Request, hit: PrefixHit, count: int, reserve: int) -> bool:
        policy = self._policy
        if hit.loaded_tokens:
            promised = self._promised_blocks()
            admitted = policy.admit_loading(request, hit, reserve=reserve, promised=promised)
        else:
            admitted = policy.admit(request, hit, count, reserve=reserve)
        if not admitted:
            return False
        self.prefix_hit_tokens += hit.tokens
        resumed = request.num_preemptions > 0
        self._news.append(Admit(request.request_id, hit.tokens, hit.loaded_tokens, resumed, hit.blocks))
        if request.hit_tokens is None:
            request.hit_tokens = hit.tokens + hit.loaded_tokens
        return True

    def _promised_blocks(self) -> int:
        """Blocks that prefills under way still need, and one step of drafts of the request to admit."""
        limits, policy = self._limits, self._policy
        drafts = limits.draft_tokens
        further = 1 + 2 * drafts if drafts else 0
        return policy.draft_blocks() + sum(
            policy.missing_blocks(other, min(other.known, limits.max_model_len) + further)
            for other in self.prefilling.values()
        )

    def _finish_loading(self, request: Request) -> bool:
        if request.request_id not in self._loaded:
            return False
        self._loaded.discard(request.request_id)
        self._policy.seal(request, request.computed)
        if request.computed == request.known:
            request.computed -= 1  # the last prompt token is always computed, its logits are needed
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True
