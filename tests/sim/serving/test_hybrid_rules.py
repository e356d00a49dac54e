import numpy as np
import pytest
from small_runs import PAGE, drive, engine, requests

from hisparsim.serving.lockstep import Lags
from hisparsim.serving.plan import Adopt, LeaseHot, Load, Lose, Preempt, Release, Restore, StepPlan, WriteBack
from hisparsim.serving.policies.hybrid_ledger import KEPT_TAIL_PAGES
from hisparsim.serving.policy import PolicyError
from hisparsim.serving.request import Status

CROWDED = [(90, 60)] * 6
"""Six requests whose pages fill the pool several times over."""


def run(sizes=CROWDED, users=6, families=0, lags=None, options=None, **limits):
    core = engine("hybrid", options, **limits)
    return core, drive(core, requests(sizes, families), users, lags)


def test_requests_go_hot_when_the_free_blocks_are_under_the_watermark() -> None:
    core, account = run(num_blocks=120)
    first_lease = account.actions(LeaseHot)[0][0]
    watermark = core.limits.transition_watermark
    assert all(step.census.free >= watermark for step in account.steps[: first_lease - 1])
    assert account.steps[first_lease - 1].census.free < watermark


def contexts_by_step(account) -> list[dict[int, int]]:
    """After each step: request -> tokens computed so far."""
    known: dict[int, int] = {}
    history = []
    for step in account.steps:
        if isinstance(step.plan, StepPlan):
            decodes = step.plan.decodes
            known.update(zip(decodes.request_ids, decodes.context_tokens.tolist(), strict=True))
            known.update({c.request_id: c.start_token + c.num_tokens for c in step.plan.prefills})
        history.append(dict(known))
    return history


def test_without_transition_on_the_watermark_only_a_full_window_makes_a_request_hot() -> None:
    _, kept = run(num_blocks=120)
    options = {"transition_on_watermark": False}
    core, changed = run(num_blocks=120, options=options, prefix_caching=False)
    window = core.limits.admission_cap_pages
    contexts = contexts_by_step(changed)
    leases = changed.actions(LeaseHot)
    assert leases
    for step, action in leases:
        assert core.limits.pages(contexts[step - 1][action.request_id]) >= window
    assert leases[0][0] > kept.actions(LeaseHot)[0][0]


def test_a_lease_asked_for_in_one_pass_is_granted_in_the_next_unless_switched_off() -> None:
    _, kept = run(num_blocks=120)
    core, changed = run(num_blocks=120, options={"lease_next_step": False})
    watermark = core.limits.transition_watermark
    low = next(step.index for step in kept.steps if step.census.free < watermark)
    assert kept.actions(LeaseHot)[0][0] == low + 1
    assert changed.actions(LeaseHot)[0][0] <= low


def test_a_failed_allocation_waits_for_a_write_back_unless_switched_off() -> None:
    _, kept = run(lags=Lags(1, 4))
    _, changed = run(lags=Lags(1, 4), options={"wait_for_write_back": False})
    assert kept.stalls > 0
    assert changed.stalls == 0
    assert changed.actions(Preempt)[0][0] < kept.actions(Preempt)[0][0]


def test_every_page_is_written_back_once_and_released_only_when_durable() -> None:
    _, account = run()
    written: set[tuple[int, int, int]] = set()
    lives: dict[int, int] = {}
    for _, action in account.actions((Preempt, WriteBack, Release)):  # type: ignore[arg-type]
        life = lives.setdefault(action.request_id, 0)
        if isinstance(action, Preempt):
            lives[action.request_id] += 1
        elif isinstance(action, WriteBack):
            pages = range(action.first_page, action.first_page + len(action.host_blocks))
            new = {(action.request_id, life, page) for page in pages}
            assert not new & written
            written |= new
        else:
            assert {(action.request_id, life, int(page)) for page in action.pages} <= written


def test_the_last_two_pages_of_a_request_are_never_released() -> None:
    core = engine("hybrid", num_blocks=60)
    specs = requests([(100, 200)] * 2)
    for spec in specs:
        core.submit(spec)
    account = drive(core, [], 0)
    contexts = contexts_by_step(account)
    releases = account.actions(Release)
    assert releases
    for step, action in releases:
        pages = core.limits.pages(contexts[step][action.request_id])
        assert action.pages.max() < pages - KEPT_TAIL_PAGES


def test_pages_that_were_clean_before_the_lease_are_released_tail_first() -> None:
    _, account = run(num_blocks=160)
    leased = {(step, action.request_id) for step, action in account.actions(LeaseHot)}
    released = [a.pages for s, a in account.actions(Release) if (s, a.request_id) in leased]
    assert max(map(len, released)) > 2
    assert all((np.diff(pages) < 0).all() for pages in released)
    assert account.actions(Lose)


def test_a_turn_finds_its_prefix_and_adopts_the_copies_left_on_the_gpu() -> None:
    core, account = run(sizes=[(96, 4), (96, 4)], users=1, families=1, num_blocks=100)
    assert core.prefix_hit_tokens == 80  # the page of the last prompt token is computed again
    (adopted,) = [action for _, action in account.actions(Adopt)]
    assert adopted.pages.tolist() == [0, 1, 2, 3, 4]


def test_a_hit_ends_where_the_gpu_has_lost_the_indexer_pages() -> None:
    sizes = [(96, 4), (180, 30), (180, 30), (96, 4)]
    core, account = run(sizes=sizes, users=1, families=3, num_blocks=70)
    plain = core.prefix_hit_tokens
    assert plain < 80
    loaded_core, loaded = run(
        sizes=sizes, users=1, families=3, num_blocks=70, options={"indexer_offload": True}
    )
    (load,) = [action for _, action in loaded.actions(Load)]
    (restore,) = [action for _, action in loaded.actions(Restore)]
    assert load.request_id == restore.request_id == 3
    assert load.num_pages == 5 - plain // PAGE
    assert restore.page == 4
    assert loaded.finished == account.finished == {0, 1, 2, 3}
    assert loaded_core.prefix_hit_tokens == plain


def test_a_request_cancelled_while_it_loads_gives_its_blocks_back_when_the_load_is_over() -> None:
    core = engine("hybrid", {"indexer_offload": True}, num_blocks=70)
    drive(core, requests([(96, 4), (180, 30), (180, 30)], 3), 1)
    spec = requests([(96, 4), (1, 1), (1, 1), (96, 4)], 3)[3]
    core.submit(spec)
    plan = core.plan()
    assert isinstance(plan, StepPlan) and plan.num_tokens == 0
    assert core.requests[3].status is Status.LOADING
    core.cancel(3)
    core.check()
    assert core.policy.pool.num_held > 0
    core.loaded(3)
    core.check()
    assert core.policy.pool.num_held == 0


def test_the_host_pool_can_be_what_keeps_a_request_out() -> None:
    core, account = run(sizes=[(150, 30)] * 3, users=3, num_blocks=200, num_host_blocks=14)
    assert max(step.census.host_used for step in account.steps) <= 13
    assert len(account.finished) == 3
    assert (
        max(len(step.plan.decodes.request_ids) for step in account.steps if isinstance(step.plan, StepPlan))
        == 1
    )
    assert core.num_preemptions == 0


@pytest.mark.parametrize("missing", ["num_groups", "hot_pages", "num_host_blocks"])
def test_limits_without_groups_hot_pages_or_host_pool_are_refused(missing: str) -> None:
    with pytest.raises(PolicyError, match="needs layer groups, a hot buffer and a host pool"):
        engine("hybrid", **{missing: 0})


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(
        PolicyError, match=r"has no option 'speed' \(it has: eager_host_mirror, indexer_offload"
    ):
        engine("hybrid", {"speed": 1})
