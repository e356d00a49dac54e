"""The plan maker: counters advance as if the step had run, and the step's snapshot is taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import NO_PAGES, Action, DecodeBatch, PrefillChunk, StepPlan, graph_bucket
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.serving.progress import StepNotes
from hisparsim.serving.request import Request
from hisparsim.serving.steady import PlanInFlight, SteadyDecodes


class PlanMaker:
    """Makes one plan after another out of what was scheduled."""

    def __init__(
        self,
        limits: ServingLimits,
        policy: ResidencyPolicy,
        steady: SteadyDecodes,
        prefilling: dict[int, Request],
        news: list[Action],
    ) -> None:
        """Whose prefill is planned to its end leaves ``prefilling``; ``news`` go into the next plan."""
        self._limits = limits
        self._policy = policy
        self._steady = steady
        self._prefilling = prefilling
        self._news = news
        self._next_plan_id = 0

    def make(
        self, chosen: list[Request], counts: list[int], num_running_chosen: int, notes: StepNotes
    ) -> StepPlan:
        """Change: the plan of the steady requests and of those chosen, by the tokens each computes.

        The first ``num_running_chosen`` ran before this plan, the others are admitted with it.
        """
        limits, steady, policy = self._limits, self._steady, self._policy
        implied = notes.steady
        steady.planned += bool(chosen or implied)  # a plan without tokens writes nothing
        ids, contexts, requests = steady.ids, steady.contexts(), implied
        notes.decode_tokens += len(implied)
        plan = PlanInFlight(self._next_plan_id, steady.planned, chosen, counts, [], [], implied)
        prefills: tuple[PrefillChunk, ...] = ()
        joining: list[Request] = []
        if chosen:
            listed, prefills = self._list(plan, num_running_chosen, notes)
            if not limits.draft_tokens:
                joining = [request for request in chosen if not request.prefilling]
            if listed:
                ids = (*ids, *[request.request_id for request in listed])
                contexts = np.concatenate([contexts, np.array([r.computed for r in listed], np.int64)])
                requests = (*implied, *listed)
        self._next_plan_id += 1
        steady.plans.append(plan)
        decodes = self._decode_batch(ids, contexts, requests)
        for request in joining:
            if request.computed < steady.end(request) and not request.ledger.paused:  # type: ignore[union-attr]
                quiet = max(steady.quiet_until(policy, request), request.computed)
                steady.join(request, steady.planned + 1 + quiet - request.computed)
        mirrored = notes.prefill_tokens * policy.mirrors_prefill + notes.decode_tokens * policy.mirrors_decode
        bucket = None if prefills else graph_bucket(len(ids))
        return StepPlan(plan.plan_id, decodes, prefills, self._take_actions(), mirrored, bucket)

    def _list(
        self, plan: PlanInFlight, num_running_chosen: int, notes: StepNotes
    ) -> tuple[list[Request], tuple[PrefillChunk, ...]]:
        """Change: count the tokens of the requests that a plan lists; (those that decode, prompt chunks)."""
        limits = self._limits
        asynchronous = limits.async_depth > 1
        listed: list[Request] = []
        prefills: list[PrefillChunk] = []
        for position, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
            before, known = request.computed, request.known
            after = before + count
            verified = max(after - known - request.placeholders, 0) if request.drafts else 0
            request.computed = after
            request.in_flight += count
            request.last_plan = plan.sequence
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
            plan.yields.append(not request.prefilling)
            plan.drafts.append(verified)
            if was_prefilling:
                notes.prefill_tokens += count
                ledger = request.ledger
                staged = ledger.num_pages - ledger.num_readable  # type: ignore[union-attr]
                prefills.append(
                    PrefillChunk(request.request_id, before, count, not request.prefilling, staged)
                )
            else:
                notes.decode_tokens += count
                listed.append(request)
        return listed, tuple(prefills)

    def _decode_batch(
        self, ids: tuple[int, ...], contexts: NDArray[np.int64], requests: tuple[Request, ...]
    ) -> DecodeBatch:
        """Query: the snapshot of decodes, their tokens in ``contexts`` [requests]."""
        limits = self._limits
        query_tokens = 1 + limits.draft_tokens
        if not self._policy.uses_groups:
            return DecodeBatch(ids, contexts, NO_PAGES, NO_PAGES, query_tokens, 0)
        pages = (contexts + (limits.page_tokens - 1)) // limits.page_tokens
        readable = [request.ledger.num_readable for request in requests]  # type: ignore[union-attr]
        resident = np.minimum(np.array(readable, np.int64), pages)
        return DecodeBatch(ids, contexts, pages, resident, query_tokens, limits.hot_rows)

    def _take_actions(self) -> tuple[Action, ...]:
        """Change: what happened since the last plan and in this one is told now."""
        if not (self._news or self._policy.actions):
            return ()
        actions = (*self._news, *self._policy.actions)
        self._news.clear()
        self._policy.actions.clear()
        return actions

    def skip(self, rounds: int) -> None:
        """Change: so many plans were made that list nobody, and as many came back."""
        self._next_plan_id += rounds
        self._steady.skip(rounds)
