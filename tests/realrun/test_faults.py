"""Planted faults: each of them changes some answer, or ends the run; none stays unseen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hisparsim_realrun.errors import RunDied
from hisparsim_realrun.executor import Executor

LENGTHS = [(150, 60), (260, 50), (130, 90), (200, 30)]
CASES = [("host-resident", 60), ("hybrid", 40)]


@pytest.fixture(scope="module")
def sound(bench, closed_loop):
    return bench("gpu-only", 40).run(closed_loop(LENGTHS, 3))


def is_found(sound, bench, closed_loop, case: tuple[str, int], fault: Callable[[Executor], None]) -> bool:
    policy, blocks = case
    try:
        run = bench(policy, blocks).run(closed_loop(LENGTHS, 3), change=fault)
    except RunDied:
        return True
    return run.log.answers != sound.log.answers or run.differences(sound) != []


@pytest.mark.parametrize("case", CASES)
def test_the_cases_read_from_the_host_and_are_sound_without_a_fault(case, sound, bench, closed_loop):
    policy, blocks = case
    run = bench(policy, blocks).run(closed_loop(LENGTHS, 3))
    assert run.executor.residency.counts.missed > 0
    assert run.differences(sound) == []


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_host_offset_in_one_layer_is_found(case, sound, bench, closed_loop):
    def fault(executor: Executor) -> None:
        inner = executor.kernels.copy_from_host

        def shifted(layer, host_rows, rows):
            inner(layer, host_rows + (layer == 1), rows)

        executor.kernels.copy_from_host = shifted

    assert is_found(sound, bench, closed_loop, case, fault)


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_mirror_of_one_step_is_found(case, sound, bench, closed_loop):
    def fault(executor: Executor) -> None:
        inner, steps = executor._mirror, [0]

        def forgetful(tokens):
            steps[0] += 1
            if steps[0] % 5:
                inner(tokens)

        executor._mirror = forgetful

    assert is_found(sound, bench, closed_loop, case, fault)


@pytest.mark.parametrize("case", CASES)
def test_a_page_released_before_its_copy_has_landed_is_found(case, sound, bench, closed_loop):
    """Copies and mirrors come so late that the policy, told otherwise, has let the pages go."""

    def fault(executor: Executor) -> None:
        late: list[Callable[[], object]] = []
        start, mirror, run = executor.copies.start, executor._mirror, executor.run

        def start_late(transfer_id, request_id, copy):
            late.append(lambda: start(transfer_id, request_id, copy))

        def run_then_catch_up(work):
            output = run(work)
            while len(late) > 6:
                late.pop(0)()
            return output

        executor.copies.start = start_late
        executor._mirror = lambda tokens: late.append(lambda: mirror(tokens))
        executor.run = run_then_catch_up

    assert is_found(sound, bench, closed_loop, case, fault)


def test_a_stale_hot_row_is_found(bench, closed_loop):
    """A slot's hot buffer is not emptied when another request takes the slot."""

    def fault(executor: Executor) -> None:
        inner, seen = executor.residency.hot.reset, set()

        def reset_once(slot: int, num_warm_rows: int = 0) -> None:
            if slot not in seen:
                inner(slot, num_warm_rows)
            seen.add(slot)

        executor.residency.hot.reset = reset_once

    lengths = [(180, 30)] * 4
    sound = bench("gpu-only", 40).run(closed_loop(lengths, 2))
    two_users = lambda _, __: closed_loop(lengths, 2)  # noqa: E731
    assert not is_found(sound, bench, two_users, ("hybrid", 22), lambda _: None)
    assert is_found(sound, bench, two_users, ("hybrid", 22), fault)


def test_a_value_that_is_not_finite_ends_the_run_and_names_the_request(bench, closed_loop):
    def fault(executor: Executor) -> None:
        executor.model.weights.layers[1].shards[0].out[0, 0] = float("nan")

    with pytest.raises(RunDied, match=r"request \d+: its .* not finite"):
        bench("hybrid", 60).run(closed_loop(LENGTHS[:1], 1), change=fault)
