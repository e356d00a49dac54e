"""The plan maker: counters advance as if the step had run, and the step's snapshot is taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Action, DecodeBatch, PrefillChunk, StepPlan, graph_bucket
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
        limits, steady = self._limits, self._steady
        asynchronous = limits.async_depth > 1
        implied = notes.steady
        steady.planned += bool(chosen or implied)  # a plan without tokens writes nothing
        decode_ids, contexts = steady.ids, steady.contexts()
        listed_contexts: list[int] = []
        listed: list[Request] = []
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
                listed_contexts.append(after)
                listed.append(request)
        notes.decode_tokens += len(implied)
        plan_id = self._next_plan_id
        self._next_plan_id += 1
        steady.plans.append(PlanInFlight(plan_id, steady.planned, chosen, counts, drafts, yields, implied))
        if listed:
            decode_ids = (*decode_ids, *[request.request_id for request in listed])
            contexts = np.concatenate([contexts, np.array(listed_contexts, np.int64)])
        decodes = self._decode_batch(decode_ids, contexts, (*implied, *listed))
        for request in joining:
            if request.computed < steady.end(request) and not request.ledger.paused:  # type: ignore[union-attr]
                quiet = max(steady.quiet_until(self._policy, request), request.computed)
                steady.join(request, steady.planned + 1 + quiet - request.computed)
        return StepPlan(
            plan_id=plan_id,
            decodes=decodes,
            prefills=tuple(prefills),
            actions=self._take_actions(),
            mirrored_tokens=notes.prefill_tokens * self._policy.mirrors_prefill
            + notes.decode_tokens * self._policy.mirrors_decode,
            graph_bucket=None if prefills else graph_bucket(len(decode_ids)),
        )

    def _decode_batch(
        self, ids: tuple[int, ...], contexts: NDArray[np.int64], requests: tuple[Request, ...]
    ) -> DecodeBatch:
        """Query: the snapshot of decodes, their tokens in ``contexts`` [requests]."""
        limits = self._limits
        pages = (contexts + (limits.page_tokens - 1)) // limits.page_tokens
        resident, hot_rows = pages, 0
        if self._policy.uses_groups:
            readable = [request.ledger.num_readable for request in requests]  # type: ignore[union-attr]
            resident = np.minimum(np.array(readable, np.int64), pages)
            hot_rows = limits.hot_rows
        return DecodeBatch(ids, contexts, pages, resident, 1 + limits.draft_tokens, hot_rows)

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
