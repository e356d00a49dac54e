"""Transfers inside a step: what is exposed, and what the other direction and other flows take away."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.cost.link_rates import LinkRates, link_rates
from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import QUIET, Background
from hisparsim.cost.terms import Term
from hisparsim.cost.transfers import StepTransfers, transfers_of
from hisparsim.specs.scenario import Scenario

ROW_BYTES, LAYERS, GROUPS = 656, 78, 21


@cache
def rates(*overrides: str) -> LinkRates:
    return link_rates(Scenario.load(overrides=overrides))


def exposed(
    load: StepLoad,
    compute_ns: float,
    *,
    overlap: float = 1.0,
    background: Background = QUIET,
    link=None,
) -> dict[str, int]:
    terms: dict[str, int] = {}
    link = link or replace(rates(), read_latency_s=0.0)
    transfers_of(StepTransfers(link, ROW_BYTES, LAYERS, GROUPS, overlap), load, compute_ns, background, terms)
    return terms


def gathers(rows: int, **changes: object) -> StepLoad:
    return replace(StepLoad(num_decodes=8, graph_requests=8, missed_millirows=rows * 1000), **changes)


def gather_ns(rows: int, link: LinkRates) -> float:
    return rows * ROW_BYTES / link.gather * 1e9


def walk(num_layers: int, gather: float, compute: float) -> float:
    """The stall of one group, layer by layer: gathers queue on one stream, layers wait for their own."""
    arrives = finished = 0.0
    for _ in range(num_layers):
        arrives += gather
        finished = max(finished, arrives) + compute
    return finished - num_layers * compute


@given(st.integers(1, 5000), st.floats(1e3, 1e7))
def test_a_group_stalls_for_its_leader_and_for_followers_that_outlast_a_layer(rows, compute_per_layer):
    gather = gather_ns(rows, rates())
    stall = exposed(gathers(rows), compute_per_layer * LAYERS)[Term.HOT_GATHER]
    sizes = [1, 1] + [4] * 19
    expected = sum(walk(size, gather, compute_per_layer) for size in sizes)
    assert stall == pytest.approx(expected, rel=1e-6, abs=2)


def test_without_overlap_and_with_verify_tokens_or_a_prefill_every_layer_stalls():
    serial = LAYERS * gather_ns(500, rates())
    assert exposed(gathers(500), 1e9, overlap=0.0)[Term.HOT_GATHER] == pytest.approx(serial, abs=2)
    assert exposed(gathers(500, query_tokens=4), 1e9)[Term.HOT_GATHER] == pytest.approx(serial, abs=2)
    mixed = gathers(500, prefill_tokens=10, graph_requests=0)
    assert exposed(mixed, 1e9)[Term.HOT_GATHER] == pytest.approx(serial, abs=2)
    hidden = exposed(gathers(500), 1e9)[Term.HOT_GATHER]
    half = exposed(gathers(500), 1e9, overlap=0.5)[Term.HOT_GATHER]
    assert half == pytest.approx((serial + hidden) / 2, abs=2)


def test_staging_hides_behind_the_layers_but_for_the_first_and_what_outlasts_them():
    staged = StepLoad(num_prefills=1, prefill_tokens=753, staged_pages=1000)
    moving = 1000 * 64 * LAYERS * ROW_BYTES / rates().h2d * 1e9
    assert exposed(staged, 1e12)[Term.STAGING] == pytest.approx(moving / LAYERS, abs=2)
    assert exposed(staged, 0.0)[Term.STAGING] == pytest.approx(moving, rel=1e-6)
    assert exposed(staged, 1e12, overlap=0.0)[Term.STAGING] == pytest.approx(moving, abs=2)


def test_reads_slow_down_while_rows_are_written_and_never_below_the_two_way_rate():
    link = replace(rates("parallel.tp=1", "parallel.dp=8", "parallel.ep=true"), read_latency_s=0.0)
    serial = {"overlap": 0.0, "link": link}
    quiet = exposed(gathers(4000), 0.0, **serial)[Term.HOT_GATHER]
    some = exposed(gathers(4000, write_back_bytes=10**7), 0.0, **serial)[Term.HOT_GATHER]
    lots = exposed(gathers(4000, write_back_bytes=10**12), 0.0, **serial)[Term.HOT_GATHER]
    assert quiet < some < lots
    assert lots == pytest.approx(quiet * link.gather / link.gather_duplex, rel=1e-6)


def test_mirroring_costs_only_what_outlasts_the_step():
    mirrored = StepLoad(num_prefills=1, prefill_tokens=1000, mirrored_tokens=1000)
    moving = 1000 * LAYERS * ROW_BYTES / rates().d2h * 1e9
    assert exposed(mirrored, 1e12)[Term.MIRROR] == 0
    assert exposed(mirrored, moving / 4)[Term.MIRROR] == pytest.approx(0.75 * moving, abs=2)


def test_other_flows_leave_a_gather_at_least_half_of_the_link():
    serial = LAYERS * gather_ns(500, rates())
    busy = exposed(gathers(500), 0.0, overlap=0.0, background=Background(h2d_bytes_per_s=5e10))
    assert serial < busy[Term.HOT_GATHER]
    assert busy[Term.HOT_GATHER] == pytest.approx(
        LAYERS * 500 * ROW_BYTES / (rates().h2d / 2) * 1e9, rel=1e-6
    )


def test_an_overlap_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="overlap"):
        StepTransfers(rates(), ROW_BYTES, LAYERS, GROUPS, 1.5)


def test_rates_are_those_of_all_gpus_at_once_and_overrides_keep_the_two_way_shares():
    all_gpus = rates()
    assert all_gpus.gather == pytest.approx(35.15e9)
    assert all_gpus.num_writers == 1
    slower = rates("links.h2d_gb_per_s=10", "links.gather_gb_per_s=5")
    assert (slower.h2d, slower.gather) == (10e9, 5e9)
    assert slower.h2d_duplex / slower.h2d == pytest.approx(all_gpus.h2d_duplex / all_gpus.h2d)
    assert rates("links.gather_gb_per_s=inf").gather == float("inf")


def test_a_single_gpu_reads_faster_than_eight_at_once():
    alone = rates("node.preset=h200x1", "parallel.tp=1", "model.preset=tiny-dsa")
    assert alone.gather > rates().gather


def test_replicas_that_all_write_get_less_each():
    many = rates("parallel.tp=1", "parallel.dp=8", "parallel.ep=true")
    assert many.num_writers == 8
    assert many.d2h < rates().d2h
    assert many.h2d_duplex < rates().h2d_duplex


def test_memory_on_the_other_socket_costs_rate_by_link_memory_and_distance():
    local, spread, remote = (
        rates(f"node.host_placement={placement}") for placement in ("local", "interleaved", "one-socket")
    )
    assert local.gather > spread.gather > remote.gather
    assert remote.h2d <= min(remote.host_dram / 8, remote.socket / 4) * (1 + 1e-9)
    narrow = rates("node.host_placement=one-socket", "links.socket_gb_per_s=40")
    assert narrow.h2d == pytest.approx(10e9)
    assert rates("links.host_dram_gb_per_s=80").h2d == pytest.approx(10e9)
