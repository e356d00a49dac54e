"""Without time, a simulator's driver and the real runner make the same decisions, record for record."""

from __future__ import annotations

import pytest

from hisparsim.des.draws import tokens_of_verify_step
from hisparsim.serving.lockstep import Lags, lockstep
from hisparsim.serving.policies import POLICIES
from hisparsim.serving.progress import Wedged
from hisparsim.serving.request import Request
from hisparsim_realrun.decisions import first_difference, records_of

BLOCKS = {True: 40, False: 9}
LENGTHS = [(150, 40), (260, 30), (130, 50), (200, 30), (90, 70)]


def accepted(request: Request, drafts: int) -> int:
    return tokens_of_verify_step(3, request.request_id, request.output_tokens, drafts, 0.6) - 1


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "never-admit"])
def test_decisions_of_both_drivers_are_equal(policy, drafts, bench, closed_loop):
    lags = Lags(enqueued=1, done=3, loaded=2)
    case = bench(policy, 30, draft_tokens=drafts)
    if policy != "thrash":
        case.num_blocks = BLOCKS[case.core().policy.uses_groups]
    simulated = []
    core = case.core()
    for step in lockstep(core, closed_loop(LENGTHS, 3, 128), lags, accepted=accepted, check=True):
        simulated += records_of(step.index, step.plan)
    run = case.run(closed_loop(LENGTHS, 3, 128), lags=lags, accepted=accepted)
    assert first_difference(run.log.decisions, simulated) is None
    assert {request: len(tokens) for request, tokens in run.log.answers.items()} == {
        number + 1: output for number, (_, output) in enumerate(LENGTHS)
    }


def test_a_policy_that_admits_nobody_is_found_by_both(bench, closed_loop):
    case = bench("never-admit", 9)
    with pytest.raises(Wedged):
        list(lockstep(case.core(), closed_loop(LENGTHS, 3), Lags()))
    with pytest.raises(Wedged):
        case.run(closed_loop(LENGTHS, 3))


def test_the_runner_plans_one_step_ahead_only_where_the_limits_say_so(bench, closed_loop):
    for depth in (1, 2):
        case = bench("hybrid", 36, async_depth=depth)
        simulated = []
        for step in lockstep(case.core(), closed_loop(LENGTHS, 3), Lags()):
            simulated += records_of(step.index, step.plan)
        run = case.run(closed_loop(LENGTHS, 3))
        assert first_difference(run.log.decisions, simulated) is None
