"""Small engines and workloads, and one lockstep run of them with its accounts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hisparsim.serving.core import ServingCore
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.lockstep import Lags, LockstepStep, lockstep
from hisparsim.serving.plan import StepPlan
from hisparsim.serving.policies import policy_class
from hisparsim.serving.progress import Completion, Wedged
from hisparsim.serving.request import Request, RequestSpec

PAGE = 16
MAX_STEPS = 20_000


def engine(
    policy: str = "hybrid", options: dict[str, object] | None = None, **changes: object
) -> ServingCore:
    """A core with pages of 16 tokens, 2 layer groups, hot buffers of 2 pages a group."""
    limits: dict[str, object] = {
        "num_blocks": 80,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
        "page_tokens": PAGE,
        "num_groups": 2 if policy == "hybrid" else 0,
        "hot_pages": 2,
        "hot_rows": 32,
        "num_host_blocks": 200 if policy == "hybrid" else 0,
    }
    made = ServingLimits(**{**limits, **changes})  # type: ignore[arg-type]
    return ServingCore(made, policy_class(policy)(made, **(options or {})))


@dataclass
class Crowd:
    """Requests that come one after another, so many at a time; conversations share their beginnings."""

    specs: list[RequestSpec]
    num_users: int
    sent: int = 0

    def first(self) -> list[RequestSpec]:
        self.sent = min(self.num_users, len(self.specs))
        return self.specs[: self.sent]

    def after(self, request_id: int) -> RequestSpec | None:
        if self.sent == len(self.specs):
            return None
        self.sent += 1
        return self.specs[self.sent - 1]


def requests(sizes: list[tuple[int, int]], families: int = 0) -> list[RequestSpec]:
    """(prompt, output) tokens of each; with ``families`` request n shares all its pages with n + families."""
    specs = []
    for number, (prompt, output) in enumerate(sizes):
        family = number % families if families else number
        keys = family * 1_000 + np.arange((prompt + output) // PAGE, dtype=np.int64)
        specs.append(RequestSpec(number, prompt, output, keys))
    return specs


@dataclass
class Account:
    """What a run did: its steps, and the tokens that came back."""

    steps: list[LockstepStep] = field(default_factory=list)
    output_tokens: Counter[int] = field(default_factory=Counter)
    finished: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    stalls: int = 0
    victims_in_flight: int = 0
    wedged: Wedged | None = None

    def actions(self, kind: type) -> list[tuple[int, object]]:
        """(step, action) of one kind."""
        return [
            (step.index, action)
            for step in self.steps
            if isinstance(step.plan, StepPlan)
            for action in step.plan.actions
            if isinstance(action, kind)
        ]


def drive(
    core: ServingCore,
    specs: list[RequestSpec],
    num_users: int,
    lags: Lags | None = None,
    *,
    accepted: Callable[[Request, int], int] | None = None,
    cancels: random.Random | None = None,
    check: bool = True,
) -> Account:
    """Run to the end (or a wedge), checking the laws in each step; ``cancels`` draws whom to cancel when."""
    account = Account()

    def completed(_plan: StepPlan, completion: Completion) -> None:
        for request, tokens in completion.tokens:
            account.output_tokens[request.request_id] += tokens
        account.finished.update(request.request_id for request in completion.finished)

    crowd = Crowd(specs, num_users)
    run = lockstep(core, crowd, lags or Lags(), accepted=accepted, on_complete=completed, check=check)
    try:
        for step in run:
            assert step.index < MAX_STEPS, "the run goes round in circles"
            account.steps.append(step)
            account.stalls += core.notes.waited
            account.victims_in_flight += core.notes.victim_in_flight
            if cancels is not None and core.requests and cancels.random() < 0.05:
                victim = cancels.choice(sorted(core.requests))
                core.cancel(victim)
                account.cancelled.add(victim)
                follower = crowd.after(victim)
                if follower is not None:
                    core.submit(follower)
                core.check()
    except Wedged as wedged:
        account.wedged = wedged
    return account
