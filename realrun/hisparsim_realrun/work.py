"""A step's work: a plan bound to the tokens that it computes, as every rank gets it.

With two plans in flight a plan is made before it is known how many drafts of the step before were accepted.
When its step starts that is known: a request's tokens begin where its settled ones end. A request that has
finished in between is computed as planned and its tokens are discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import Outcome, StepPlan
from hisparsim.serving.request import Request


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one request computed in a step: ``[start, start + count)``."""

    request_id: int
    start: int
    count: int
    is_prefill: bool
    first_yield: int
    """Place in the span of the first token whose successor is sampled."""
    num_yields: int
    """Tokens that the step gives the request."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def wrong_from(self) -> int:
        """Position of the first draft that is not accepted."""
        return self.start + self.first_yield + self.num_yields if self.num_yields else self.end


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """Everything a rank needs for one step, besides what it knows of the requests."""

    plan: StepPlan
    spans: tuple[Span, ...]
    """Decodes in the plan's order, then prefill chunks in the plan's order."""

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)


Accepted = Callable[[Request, int], int]
"""How many of so many drafts of a request a step accepts."""


def bind(core: ServingCore, plan: StepPlan, accepted: Accepted) -> StepWork:
    """Change: the work of a plan whose step starts now: all steps before it have come back, none is planned
    after it. Settles the core's counters."""
    core.settle()
    drafts = {request.request_id: count for request, count in core.drafts_to_verify(plan.plan_id)}

    def yields(request_id: int) -> int:
        verified = drafts.get(request_id, 0)
        return 1 + (accepted(core.requests[request_id], verified) if verified else 0)

    spans = []
    for position, request_id in enumerate(plan.decodes.request_ids):
        request = core.requests.get(request_id)
        if request is None:
            count = plan.decodes.query_tokens
            start = int(plan.decodes.context_tokens[position]) - count
            spans.append(Span(request_id, start, count, False, 0, 1))
        else:
            count = request.in_flight
            spans.append(
                Span(request_id, request.computed - count, count, False, 0, min(yields(request_id), count))
            )
    for chunk in plan.prefills:
        request = core.requests.get(chunk.request_id)
        first, num_yields = chunk.num_tokens - 1, 0
        if chunk.is_last and request is not None:
            first = max(min(chunk.num_tokens, request.known - chunk.start_token) - 1, 0)
            num_yields = min(yields(chunk.request_id), chunk.num_tokens - first)
        spans.append(Span(chunk.request_id, chunk.start_token, chunk.num_tokens, True, first, num_yields))
    return StepWork(plan, tuple(spans))


def outcome_of(core: ServingCore, work: StepWork) -> Outcome:
    """Query: what a finished step tells the core: the accepted tokens of requests with drafts."""
    alive = {request.request_id for request, _ in core.drafts_to_verify(work.plan.plan_id)}
    accepted = {span.request_id: span.num_yields for span in work.spans if span.request_id in alive}
    return Outcome(accepted) if accepted else Outcome()
