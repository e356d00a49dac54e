"""News of transfers: when the core hears that copies were enqueued, are durable, or have been loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simpy

from hisparsim.cost.link_rates import link_rates
from hisparsim.des.links import HostLinks, TransferKind
from hisparsim.des.transfers import TransferDesk
from hisparsim.serving.plan import (
    Action,
    DecodeBatch,
    Load,
    StepPlan,
    TransferPhase,
    TransferUpdate,
    WriteBack,
)
from hisparsim.specs.scenario import Scenario

pytestmark = pytest.mark.interpreted  # a listener stands in for the core
NOTHING = np.empty(0, np.int64)
STEP_NS = 1_000


class Listener:
    """Stands for a core: notes what it is told and when."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.heard: list[tuple[int, int, TransferPhase]] = []
        self.loads: list[tuple[int, int]] = []

    def notify(self, updates: Iterable[TransferUpdate]) -> None:
        self.heard += [(int(self.env.now), update.transfer_id, update.phase) for update in updates]

    def loaded(self, request_id: int) -> None:
        self.loads.append((int(self.env.now), request_id))


def plan(plan_id: int, *actions: Action) -> StepPlan:
    nobody = DecodeBatch((), NOTHING, NOTHING, NOTHING, 1, 0)
    return StepPlan(plan_id, nobody, (), actions, 0, None)


def write_back(transfer_id: int, num_bytes: int) -> WriteBack:
    return WriteBack(transfer_id, 7, 0, np.zeros(1, np.int64), np.zeros((1, 1), np.int64), num_bytes)


def load(transfer_id: int, num_bytes: int) -> Load:
    return Load(transfer_id, 7, 1, num_bytes, NOTHING, np.zeros(1, np.int64))


def play(actions: dict[int, list[Action]], steps: int, bytes_per_s: float) -> tuple[Listener, TransferDesk]:
    """Steps of a microsecond each, plan n made for step n."""
    env = simpy.Environment()
    rates = replace(link_rates(Scenario.load()), h2d=bytes_per_s, d2h=bytes_per_s)
    listener: Any = Listener(env)
    desk = TransferDesk(env, HostLinks(env, rates)[0], listener, TransferKind.WRITE_BACK)

    def serve() -> Iterable[simpy.Event]:
        for number in range(steps):
            started_ns = int(env.now)
            step = plan(number, *actions.get(number, []))
            desk.start(step)
            yield env.timeout(STEP_NS)
            desk.end(step, started_ns)

    env.process(serve())
    env.run(until=steps * STEP_NS + 1)
    return listener, desk


def test_a_mirrored_page_is_enqueued_after_one_step_and_durable_after_two() -> None:
    listener, desk = play({2: [write_back(0, 0)]}, 6, 1e9)
    assert listener.heard == [(4_000, 0, TransferPhase.ENQUEUED), (5_000, 0, TransferPhase.DONE)]
    assert (desk.d2h_bytes, desk.num_flows, desk.outstanding) == (0, 0, False)


def test_a_copy_of_its_own_starts_when_its_step_has_ended_and_is_seen_by_a_step_that_starts_after_it() -> (
    None
):
    """2,500 ns of copying from 1,000 on: seen by the step that starts at 4,000, reported at 5,000."""
    listener, desk = play({0: [write_back(3, 2_500)]}, 7, 1e9)
    assert listener.heard == [(2_000, 3, TransferPhase.ENQUEUED), (5_000, 3, TransferPhase.DONE)]
    assert desk.d2h_bytes == 2_500


def test_a_load_starts_with_its_step_and_lets_its_request_run() -> None:
    listener, desk = play({1: [load(4, 500)]}, 5, 1e9)
    assert listener.heard == [(3_000, 4, TransferPhase.DONE)]
    assert listener.loads == [(3_000, 7)]
    assert desk.h2d_bytes == 500


def test_while_no_step_runs_news_is_reported_at_once() -> None:
    listener, desk = play({1: [write_back(0, 0), load(1, 100)]}, 2, 1e9)
    assert desk.outstanding
    assert desk.report_idle()
    phases = [(transfer, phase) for _, transfer, phase in listener.heard]
    assert phases == [(0, TransferPhase.ENQUEUED), (0, TransferPhase.DONE), (1, TransferPhase.DONE)]
    assert not desk.outstanding and not desk.report_idle()


def test_quiet_plans_end_where_the_next_news_is_due() -> None:
    listener, desk = play({1: [write_back(0, 0)]}, 2, 1e9)
    assert not listener.heard
    assert desk.quiet_plans(2) == 0  # plan 2 brings the news that the copy was enqueued
    _, flying = play({1: [load(1, 1_000_000)]}, 2, 1e9)
    assert flying.quiet_plans(2) == 0 and flying.num_flows == 1
    _, silent = play({}, 2, 1e9)
    assert silent.quiet_plans(2) > 1_000_000
