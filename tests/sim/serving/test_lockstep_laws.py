import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import Account, drive, engine, requests

from hisparsim.serving.core import ServingCore
from hisparsim.serving.lockstep import Lags
from hisparsim.serving.plan import Finish, Idle, Restore, StepPlan
from hisparsim.serving.request import RequestSpec


@dataclass(frozen=True)
class Case:
    """One random run: an engine, its users and what disturbs them."""

    policy: str
    options: dict[str, Any]
    limits: dict[str, Any]
    sizes: list[tuple[int, int]]
    families: int
    num_users: int
    lags: Lags
    cancels: int | None
    pattern: list[int]

    def run(self, **changes: Any) -> tuple[ServingCore, list[RequestSpec], Account]:
        core = engine(self.policy, self.options, **{**self.limits, **changes})
        specs = [spec for spec in requests(self.sizes, self.families) if core.refusal(spec) is None]
        drafts, steps = core.limits.draft_tokens, iter(range(1_000_000))

        def accepted(_request: Any, num_drafts: int) -> int:
            return min(self.pattern[next(steps) % len(self.pattern)], num_drafts)

        account = drive(
            core,
            specs,
            self.num_users,
            self.lags,
            accepted=accepted if drafts else None,
            cancels=None if self.cancels is None else random.Random(self.cancels),
        )
        return core, specs, account


@st.composite
def cases(draw: st.DrawFn, policies: tuple[str, ...] = ("gpu-only", "hybrid")) -> Case:
    policy = draw(st.sampled_from(policies))
    limits: dict[str, Any] = {
        "num_blocks": draw(st.integers(14, 90)) if policy == "hybrid" else draw(st.integers(4, 40)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 40, 64, 200])),
        "async_depth": draw(st.sampled_from([1, 2])),
        "draft_tokens": draw(st.sampled_from([0, 0, 1, 3])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "max_model_len": draw(st.sampled_from([120, 400])),
    }
    options: dict[str, Any] = {}
    if policy == "hybrid":
        limits["num_host_blocks"] = draw(st.integers(6, 60))
        limits["hot_pages"] = draw(st.integers(1, 3))
        switches = ("wait_for_write_back", "transition_on_watermark", "lease_next_step")
        options = {name: draw(st.sampled_from([True, True, False])) for name in switches}
        options["indexer_offload"] = draw(st.booleans())
    enqueued = draw(st.integers(1, 2))
    return Case(
        policy,
        options,
        limits,
        draw(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=8)),
        draw(st.sampled_from([0, 1, 2, 3])),
        draw(st.integers(1, 8)),
        Lags(enqueued, draw(st.integers(enqueued, 5)), draw(st.integers(1, 3))),
        draw(st.sampled_from([None, None, 0, 1, 2])),
        draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    )


def check_tokens(core: ServingCore, specs: list[RequestSpec], account: Account) -> None:
    """L6: each request's tokens, counted on both sides."""
    ends = {action.request_id: action for _, action in account.actions(Finish)}  # type: ignore[attr-defined]
    window = core.limits.max_model_len
    for spec in specs:
        if spec.request_id in account.finished:
            expected = min(spec.output_tokens, window - spec.prompt_tokens)
            assert account.output_tokens[spec.request_id] == expected
        elif spec.request_id not in account.cancelled:
            assert account.wedged is not None
        if spec.request_id in ends:
            assert ends[spec.request_id].output_tokens == account.output_tokens[spec.request_id]
    assert not account.finished & account.cancelled
    assert core.num_finished == len(account.finished)


@settings(deadline=None, max_examples=250)
@given(case=cases())
def test_the_laws_hold_in_every_step_and_every_token_is_accounted_for(case: Case) -> None:
    core, specs, account = case.run()
    check_tokens(core, specs, account)
    if account.wedged is None:
        assert core.num_alive == 0
        assert core.policy.pool.num_held == 0
        if case.policy == "hybrid":
            assert core.policy.host.num_held == 0  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_the_same_run_makes_the_same_decisions(case: Case) -> None:
    def shape(account: Account) -> list[Any]:
        return [
            step.census
            if isinstance(step.plan, Idle)
            else (
                step.census,
                step.plan.decodes.request_ids,
                step.plan.decodes.context_tokens.tolist(),
                step.plan.prefills,
                [type(action) for action in step.plan.actions],
            )
            for step in account.steps
        ]

    assert shape(case.run()[2]) == shape(case.run()[2])


@settings(deadline=None, max_examples=80)
@given(case=cases(policies=("hybrid",)))
def test_synchronous_scheduling_never_finds_its_victim_in_flight(case: Case) -> None:
    account = case.run(async_depth=1)[2]
    assert account.victims_in_flight == 0


@settings(deadline=None, max_examples=80)
@given(case=cases(policies=("hybrid",)))
def test_synchronous_scheduling_never_stalls_when_copies_end_with_their_step(case: Case) -> None:
    """But for a page that a loaded prefix restores: its copy starts with the plan that may have to wait."""
    account = replace(case, lags=Lags(0, 0)).run(async_depth=1)[2]
    assert account.stalls <= len(account.actions(Restore))


@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_a_plan_never_exceeds_its_limits(case: Case) -> None:
    core, _, account = case.run()
    limits = core.limits
    for step in account.steps:
        if isinstance(step.plan, StepPlan):
            assert step.plan.decodes.num_requests + len(step.plan.prefills) <= limits.max_num_seqs
            assert sum(chunk.num_tokens for chunk in step.plan.prefills) <= limits.max_num_batched_tokens
            assert all(step.plan.decodes.resident_pages <= step.plan.decodes.pages)


@pytest.mark.parametrize("policy", ["gpu-only", "hybrid"])
def test_what_an_empty_engine_accepts_it_serves_alone(policy: str) -> None:
    for prompt in range(1, 200, 13):
        core = engine(policy, num_blocks=70 if policy == "hybrid" else 20)
        specs = requests([(prompt, 150)])
        if core.refusal(specs[0]) is None:
            account = drive(core, specs, 1)
            assert account.wedged is None
            assert account.output_tokens[0] == 150
