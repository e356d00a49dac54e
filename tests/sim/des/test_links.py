"""Links: equal shares, no byte lost, never faster than the caps, and equal to a slow fluid simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.cost.link_rates import LinkRates, link_rates
from hisparsim.des.links import (
    NANO,
    Direction,
    HostLinks,
    LinkError,
    LinkLawError,
    TransferKind,
    fill,
)
from hisparsim.specs.scenario import Scenario

KINDS = list(TransferKind)
RATES = link_rates(Scenario.load())
TWO_REPLICAS = replace(
    RATES,
    h2d=50e9,
    d2h=40e9,
    h2d_duplex=30e9,
    d2h_duplex=20e9,
    host_dram=300e9,
    socket=90e9,
    num_gpus=8,
    num_writers=2,
    num_replicas=2,
    crossing_gpus=4.0,
)


@dataclass(frozen=True)
class Job:
    """A transfer to play: when, over which link, how much, of what kind."""

    start_ns: int
    replica: int
    num_bytes: int
    kind: TransferKind


JOBS = st.lists(
    st.builds(
        Job,
        start_ns=st.integers(0, 200_000),
        replica=st.integers(0, 1),
        num_bytes=st.integers(0, 3_000_000),
        kind=st.sampled_from(KINDS),
    ),
    min_size=1,
    max_size=12,
)


def play(jobs: list[Job], rates: LinkRates) -> tuple[list[int], HostLinks]:
    """Run jobs through the links, checking the laws at each completion. Returns the ns each took."""
    env = simpy.Environment()
    links = HostLinks(env, rates)
    ended = [-1] * len(jobs)

    def job(index: int, wanted: Job):
        yield env.timeout(wanted.start_ns)
        yield links[wanted.replica].transfer(wanted.num_bytes, wanted.kind)
        links.check()
        ended[index] = env.now

    for index, wanted in enumerate(jobs):
        env.process(job(index, wanted))
    env.run()
    links.check()
    return [end - wanted.start_ns for end, wanted in zip(ended, jobs, strict=True)], links


def fluid(jobs: list[Job], rates: LinkRates) -> list[Fraction]:
    """The slow reference: exact fractions, each flow on its own, from event to event."""
    replicas = rates.num_replicas
    readers = rates.num_gpus // replicas
    weights = {
        Direction.H2D: (readers, Fraction(rates.crossing_gpus) / replicas),
        Direction.D2H: (
            rates.num_writers // replicas,
            Fraction(rates.crossing_gpus) / replicas * rates.num_writers / replicas / readers,
        ),
    }
    caps = {
        Direction.H2D: (Fraction(rates.h2d), Fraction(rates.h2d_duplex)),
        Direction.D2H: (Fraction(rates.d2h), Fraction(rates.d2h_duplex)),
    }
    left = {index: Fraction(job.num_bytes) for index, job in enumerate(jobs)}
    ended = [Fraction(job.start_ns) for job in jobs]
    now = Fraction(0)
    waiting = sorted(range(len(jobs)), key=lambda index: jobs[index].start_ns)
    active: set[int] = set()
    while active or waiting:
        while waiting and jobs[waiting[0]].start_ns <= now:
            index = waiting.pop(0)
            if left[index]:
                active.add(index)
        lanes = sorted({(jobs[i].replica, jobs[i].kind.direction) for i in active}, key=str)
        lane_rates = dict.fromkeys(lanes, Fraction(0))
        rising = set(lanes)
        while rising:
            steps = []
            for replica, direction in rising:
                other = Direction.D2H if direction is Direction.H2D else Direction.H2D
                cap = caps[direction][(replica, other) in lanes]
                steps.append((cap - lane_rates[replica, direction], {(replica, direction)}))
            limits = [
                (Fraction(rates.host_dram), {lane: Fraction(weights[lane[1]][0]) for lane in lanes}),
                *(
                    (Fraction(rates.socket), {lane: weights[lane[1]][1] for lane in lanes if lane[1] is side})
                    for side in Direction
                ),
            ]
            for capacity, loads in limits:
                load = sum((loads.get(lane, Fraction(0)) for lane in rising), Fraction(0))
                if load:
                    used = sum((loads.get(lane, 0) * lane_rates[lane] for lane in lanes), Fraction(0))
                    steps.append(((capacity - used) / load, {lane for lane in rising if loads.get(lane)}))
            step = min(amount for amount, _ in steps)
            for lane in rising:
                lane_rates[lane] += step
            rising -= set().union(*(stopped for amount, stopped in steps if amount == step))
        flow_rates = {}
        for index in active:
            lane = (jobs[index].replica, jobs[index].kind.direction)
            count = sum((jobs[i].replica, jobs[i].kind.direction) == lane for i in active)
            flow_rates[index] = lane_rates[lane] / count / NANO
        ends = [now + left[index] / flow_rates[index] for index in active]
        if waiting:
            ends.append(Fraction(jobs[waiting[0]].start_ns))
        if not ends:
            break
        until = min(ends)
        for index in list(active):
            left[index] -= flow_rates[index] * (until - now)
            if left[index] <= 0:
                active.discard(index)
                ended[index] = until
        now = until
    return [end - job.start_ns for end, job in zip(ended, jobs, strict=True)]


@settings(deadline=None, max_examples=150)
@given(JOBS)
def test_transfers_end_when_a_fluid_simulation_says(jobs):
    took, _ = play(jobs, TWO_REPLICAS)
    # Each completion is rounded up to a ns, which delays its followers by as much at most.
    for found, exact in zip(took, fluid(jobs, TWO_REPLICAS), strict=True):
        assert float(exact) - 1e-3 <= found + len(jobs) and found <= float(exact) + 2 * len(jobs) + 1


@settings(deadline=None)
@given(JOBS)
def test_every_byte_arrives_and_none_twice(jobs):
    _, links = play(jobs, TWO_REPLICAS)
    for replica in range(2):
        for direction in Direction:
            submitted = sum(
                job.num_bytes for job in jobs if job.replica == replica and job.kind.direction is direction
            )
            assert links[replica].moved_bytes(direction) == submitted
            assert links[replica].num_flows(direction) == 0


@settings(deadline=None)
@given(JOBS, st.randoms(use_true_random=False))
def test_the_order_of_submission_does_not_matter(jobs, random):
    together = [replace(job, start_ns=job.start_ns // 50_000 * 50_000) for job in jobs]
    order = list(range(len(jobs)))
    random.shuffle(order)
    took, _ = play(together, TWO_REPLICAS)
    shuffled, _ = play([together[index] for index in order], TWO_REPLICAS)
    assert [took[index] for index in order] == shuffled


@settings(deadline=None)
@given(JOBS)
def test_no_transfer_is_faster_than_its_own_cap(jobs):
    took, _ = play(jobs, TWO_REPLICAS)
    for job, ns in zip(jobs, took, strict=True):
        cap = TWO_REPLICAS.h2d if job.kind.direction is Direction.H2D else TWO_REPLICAS.d2h
        assert ns >= math.floor(job.num_bytes / cap * NANO)


@pytest.mark.parametrize("num_flows", [1, 2, 7, 500])
def test_flows_of_one_direction_share_it_equally(num_flows):
    jobs = [Job(0, 0, 1_000_000, TransferKind.WRITE_BACK)] * num_flows
    took, _ = play(jobs, RATES)
    assert len(set(took)) == 1
    assert took[0] == pytest.approx(num_flows * 1_000_000 / RATES.d2h * NANO, rel=1e-6, abs=1)


def test_both_directions_at_once_get_the_two_way_rates():
    jobs = [Job(0, 0, 10_000_000, TransferKind.WRITE_BACK), Job(0, 0, 10_000_000, TransferKind.RESTORE)]
    written, loaded = play(jobs, RATES)[0]
    assert loaded == pytest.approx(1e7 / RATES.h2d_duplex * NANO, rel=1e-6)
    left = 1e7 - RATES.d2h_duplex * loaded / NANO
    assert written == pytest.approx(loaded + left / RATES.d2h * NANO, rel=1e-6)


def test_a_narrow_host_memory_slows_all_links_alike():
    rates = replace(TWO_REPLICAS, host_dram=80e9, socket=math.inf)
    jobs = [Job(0, replica, 1_000_000, TransferKind.RESTORE) for replica in range(2)]
    assert play(jobs, rates)[0] == [pytest.approx(1e6 / 10e9 * NANO, rel=1e-6)] * 2


def test_a_narrow_socket_link_slows_the_links_that_cross_it():
    rates = replace(TWO_REPLICAS, socket=40e9, host_dram=math.inf)
    jobs = [Job(0, replica, 1_000_000, TransferKind.RESTORE) for replica in range(2)]
    assert play(jobs, rates)[0] == [pytest.approx(1e6 / 10e9 * NANO, rel=1e-6)] * 2


def test_free_links_and_empty_transfers_end_at_once():
    free = replace(RATES, h2d=math.inf, h2d_duplex=math.inf)
    assert play([Job(5, 0, 10**12, TransferKind.RESTORE), Job(7, 0, 0, TransferKind.STAGE)], free)[0] == [
        0,
        0,
    ]


def test_the_background_is_what_flows_move_now():
    env = simpy.Environment()
    link = HostLinks(env, RATES)[0]
    assert link.background().h2d_bytes_per_s == 0.0
    link.transfer(10**9, TransferKind.RESTORE)
    assert link.background().h2d_bytes_per_s == pytest.approx(RATES.h2d)
    link.transfer(10**9, TransferKind.OFFLOAD)
    assert link.background().h2d_bytes_per_s == pytest.approx(RATES.h2d_duplex)
    assert link.background().d2h_bytes_per_s == pytest.approx(RATES.d2h_duplex)
    env.run(until=1_000_000)
    assert link.moved_bytes(Direction.H2D) == pytest.approx(RATES.h2d_duplex / 1000, rel=1e-6)


def test_a_link_that_moves_too_much_breaks_law_l8():
    env = simpy.Environment()
    links = HostLinks(env, RATES)
    links[0].transfer(10**9, TransferKind.RESTORE)
    links[0].lanes[0].flow_rate *= 2
    env.run(until=1000)
    with pytest.raises(LinkLawError, match="caps allow"):
        links.check()


def test_impossible_transfers_and_rates_are_refused():
    env = simpy.Environment()
    with pytest.raises(LinkError, match="negative"):
        HostLinks(env, RATES)[0].transfer(-1, TransferKind.RESTORE)
    with pytest.raises(LinkError, match="rate"):
        HostLinks(env, replace(RATES, d2h=10.0))
    assert len(HostLinks(env, TWO_REPLICAS)) == 2


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 3000)), st.integers(0, 3)), max_size=3),
)
def test_filling_keeps_every_cap_and_limit_and_stops_nothing_early(caps, drawn):
    limits = [(capacity, [(weight + index) % 4 for index in range(len(caps))]) for capacity, weight in drawn]
    rates = fill(caps, limits)
    for rate, cap in zip(rates, caps, strict=True):
        assert 0 <= rate <= cap
    for capacity, weights in limits:
        if capacity is not None:
            assert sum(w * r for w, r in zip(weights, rates, strict=True)) <= capacity
    for index, (rate, cap) in enumerate(zip(rates, caps, strict=True)):
        if rate == cap:
            continue
        assert any(
            capacity is not None
            and weights[index]
            and capacity - sum(w * r for w, r in zip(weights, rates, strict=True)) < sum(weights)
            and all(rates[i] <= rate for i in range(len(caps)) if weights[i])
            for capacity, weights in limits
        )
