import pytest
from small_runs import PAGE, drive, engine, requests

from hisparsim.serving.lockstep import Lags, lockstep
from hisparsim.serving.plan import Finish, Idle, Outcome, Preempt, StepPlan
from hisparsim.serving.progress import ProtocolError, Wedged
from hisparsim.serving.request import Status


def test_plans_complete_in_order_only() -> None:
    core = engine("gpu-only")
    for spec in requests([(20, 5)]):
        core.submit(spec)
    first, second = core.plan(), core.plan()
    assert isinstance(first, StepPlan) and isinstance(second, StepPlan)
    with pytest.raises(ProtocolError, match="plan 1 completed, the oldest in flight is 0"):
        core.complete(second.plan_id, Outcome())
    with pytest.raises(ProtocolError, match="2 plans are in flight"):
        core.plan()


def test_a_request_id_is_used_once_at_a_time_and_only_live_ones_are_cancelled() -> None:
    core = engine("gpu-only")
    spec = requests([(20, 5)])[0]
    core.submit(spec)
    with pytest.raises(ProtocolError, match="request 0 was submitted already"):
        core.submit(spec)
    core.cancel(0)
    with pytest.raises(ProtocolError, match="request 0 is not alive"):
        core.cancel(0)
    assert core.num_alive == 0


def test_nobody_waits_for_a_load_that_was_not_planned() -> None:
    core = engine("gpu-only")
    core.submit(requests([(20, 5)])[0])
    with pytest.raises(ProtocolError, match="request 0 does not wait for a load"):
        core.loaded(0)


def test_a_stopped_request_leaves_and_its_token_in_flight_is_discarded() -> None:
    core = engine("gpu-only")
    core.submit(requests([(20, 50)])[0])
    plans = [core.plan(), core.plan()]
    core.complete(plans[0].plan_id, Outcome())  # type: ignore[union-attr]
    plans.append(core.plan())
    done = core.complete(plans[1].plan_id, Outcome(stopped=frozenset({0})))  # type: ignore[union-attr]
    assert [request.status for request in done.finished] == [Status.FINISHED]
    assert done.finished[0].output_tokens == 2
    surplus = core.complete(plans[2].plan_id, Outcome())  # type: ignore[union-attr]
    assert surplus.surplus_tokens == core.discarded_tokens == 1
    assert core.policy.pool.num_held == 0
    core.check()


def test_rejected_drafts_roll_back_counts_and_not_pages() -> None:
    core = engine("gpu-only", draft_tokens=3, async_depth=1)
    core.submit(requests([(PAGE - 1, 40)])[0])
    first = core.plan()
    core.complete(first.plan_id, Outcome())  # type: ignore[union-attr]
    second = core.plan()
    assert isinstance(second, StepPlan)
    (request, drafts), *_ = core.drafts_to_verify(second.plan_id)
    held = core.policy.pool.num_held
    core.complete(second.plan_id, Outcome({0: 1}))
    assert drafts == 3
    assert (request.known, request.computed) == (PAGE + 1, PAGE)
    assert core.policy.pool.num_held == held
    core.check()


def test_accepted_drafts_beyond_the_last_token_are_discarded() -> None:
    core = engine("gpu-only", draft_tokens=3, async_depth=1)
    account = drive(core, requests([(10, 6)]), 1, accepted=lambda _request, drafts: drafts)
    assert account.output_tokens[0] == 6
    assert core.discarded_tokens == 3


def test_what_can_never_be_served_is_refused_with_the_setting_to_change() -> None:
    core = engine("gpu-only", num_blocks=6, max_model_len=200)
    long, large = requests([(150, 60), (100, 20)])
    assert "the window has 200 (scheduler.max_model_len)" in (core.refusal(long) or "")
    assert "needs 8 blocks at its end, the GPU pool has 5 (kv.gpu_kv_gib)" in (core.refusal(large) or "")


def test_a_wedged_run_names_the_request_and_what_it_waits_for() -> None:
    core = engine("gpu-only", num_blocks=6)
    account = drive(core, requests([(30, 4), (120, 4)]), 2)
    assert isinstance(account.wedged, Wedged)
    assert str(account.wedged).startswith("request 1 (120 tokens) waits for gpu_blocks")
    assert account.finished == {0}


def test_a_wedged_run_idles_for_as_many_steps_as_it_is_asked_to() -> None:
    core = engine("gpu-only", num_blocks=6)

    class One:
        def first(self) -> list:
            return requests([(120, 4)])

        def after(self, _request_id: int) -> None:
            return None

    steps = list(lockstep(core, One(), Lags(), max_steps=50))
    assert len(steps) == 50
    assert all(isinstance(step.plan, Idle) for step in steps)


def test_the_newest_request_is_preempted_first_and_resumes_at_the_front() -> None:
    core = engine("gpu-only", num_blocks=14, async_depth=1)
    account = drive(core, requests([(48, 60), (48, 60), (48, 60)]), 3)
    preempted = [action.request_id for _, action in account.actions(Preempt)]  # type: ignore[attr-defined]
    finished = [action.request_id for _, action in account.actions(Finish)]  # type: ignore[attr-defined]
    assert preempted[0] == 2
    assert account.finished == {0, 1, 2}
    assert finished[0] == 0


def test_the_queue_stops_at_the_first_request_that_does_not_fit() -> None:
    core = engine("gpu-only", num_blocks=14, async_depth=1)
    account = drive(core, requests([(100, 30), (150, 4), (10, 4)]), 3)
    first_seen = {
        chunk.request_id: step.index
        for step in reversed(account.steps)
        if isinstance(step.plan, StepPlan)
        for chunk in step.plan.prefills
    }
    assert first_seen[2] > first_seen[1] > 30
