"""One recorded step schedule, its pages forced through every transition: the bits stay the same.

The products keep their ordinary shapes here: with the same batches even those must not matter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparsim.serving.plan import Action, Admit, Adopt, Allocate, Finish, LeaseHot, Lose, Restore
from hisparsim_realrun.errors import RunDied
from hisparsim_realrun.executor import Executor
from hisparsim_realrun.work import StepWork

PAGE = 64
LENGTHS = [(150, 40), (260, 30), (130, 50)]


class Placer:
    """Gives each request all its blocks at once, then loses, restores and leases at random."""

    def __init__(self, executor: Executor, seed: int, restless: float) -> None:
        self.executor = executor
        self.random = np.random.default_rng(seed)
        self.restless = restless
        self.groups = executor.pools.geometry.num_groups
        self.free = list(range(executor.pools.num_blocks - 1, 0, -1))
        self.free_host = list(range(len(executor.pools.host) - 1, 0, -1))
        self.held: dict[int, dict[int, np.ndarray]] = {}
        self.host: dict[int, np.ndarray] = {}
        self.transitions = {"lose": 0, "restore": 0, "lease": 0}

    def _take(self, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.array([self.free.pop() for _ in range(count)], np.int64).reshape(shape)

    def work(self, recorded: StepWork) -> StepWork:
        actions: list[Action] = []
        for span in recorded.spans:
            if span.request_id not in self.held:
                actions += self._admit(span.request_id)
            elif self.restless:
                actions += self._disturb(span.request_id, span.start)
        return replace(recorded, plan=replace(recorded.plan, actions=tuple(actions)))

    def _admit(self, request_id: int) -> list[Action]:
        pages = 6
        resident = self._take(pages, self.groups)
        self.held[request_id] = {page: resident[page] for page in range(pages)}
        self.host[request_id] = np.array([self.free_host.pop() for _ in range(pages)], np.int64)
        return [
            Admit(request_id, 0, 0, False),
            Allocate(request_id, 0, self._take(pages), resident, self.host[request_id]),
            LeaseHot(request_id, self._take(self.groups, 2)),
        ]

    def _disturb(self, request_id: int, start: int) -> list[Action]:
        """Only pages before the newest token may move: they are complete in the host."""
        actions: list[Action] = []
        held = self.held[request_id]
        for page in range(start // PAGE):
            if self.random.random() > self.restless:
                continue
            if page in held:
                blocks = held.pop(page)
                self.free[:0] = blocks.tolist()
                for block in blocks.tolist():  # what was there is gone: nobody may read it any more
                    self.executor.pools.gpu[block] = 0xFF
                actions.append(Lose(request_id, np.array([page], np.int64)))
                self.transitions["lose"] += 1
            else:
                held[page] = self._take(self.groups)
                host = int(self.host[request_id][page])
                actions.append(Restore(0, request_id, page, host, held[page], 1))
                actions.append(Adopt(request_id, np.array([page], np.int64), held[page][None]))
                self.transitions["restore"] += 1
        if self.random.random() < self.restless / 3:
            actions.append(LeaseHot(request_id, self._take(self.groups, 2)))
            self.transitions["lease"] += 1
        return actions


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), restless=st.sampled_from([0.1, 0.4, 0.8]))
def test_forced_placements_give_the_bits_of_pages_that_never_move(seed, restless, bench, closed_loop):
    case = bench("hybrid", 600, invariant=False, num_host_blocks=60)
    recorded = case.run(closed_loop(LENGTHS, 3))
    states: list[dict[tuple[int, int], torch.Tensor]] = []
    transitions = {}
    for amount in (0.0, restless):
        executor = case.executor(case.core())
        for number in range(len(LENGTHS)):
            executor.content.register(_spec(closed_loop, number))
        placer = Placer(executor, seed, amount)
        for work in recorded.log.works:
            executor.run(placer.work(work))
        assert executor.hidden is not None
        states.append(executor.hidden)
        transitions = placer.transitions
    assert all(transitions.values())
    assert states[0].keys() == states[1].keys() == recorded.hidden.keys()
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []
    assert [key for key in states[0] if not torch.equal(states[0][key], recorded.hidden[key])] == []


def _spec(closed_loop, number):
    return closed_loop(LENGTHS, 3).first()[number]


def test_a_page_that_is_nowhere_to_be_read_ends_the_run(bench, closed_loop):
    case = bench("hybrid", 600, num_host_blocks=60)
    recorded = case.run(closed_loop(LENGTHS[:1], 1))
    executor = case.executor(case.core())
    executor.content.register(_spec(closed_loop, 0))
    placer = Placer(executor, 0, 0.0)
    works = [placer.work(work) for work in recorded.log.works]
    lost = works[5]
    table_entry = Lose(1, np.array([0], np.int64))
    works[5] = replace(lost, plan=replace(lost.plan, actions=(*lost.plan.actions, table_entry)))
    executor.run(works[0])
    executor.residency.tables[1].host[0] = 0
    with pytest.raises(RunDied, match="neither on the GPU nor the host"):
        for work in works[1:]:
            executor.run(work)


def test_a_request_that_finished_leaves_no_trace_in_the_tables(bench, closed_loop):
    case = bench("hybrid", 60)
    run = case.run(closed_loop(LENGTHS, 2))
    tables = run.executor.residency.tables.tables
    finished = {a.request_id for work in run.log.works for a in work.plan.actions if isinstance(a, Finish)}
    assert not finished & tables.keys()
