"""Laws of the roofline source: bulk pricing, additivity, monotonicity, ideal limits, scaling."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.cost.load import MOVING, StepLoad
from hisparsim.cost.model import Background
from hisparsim.cost.roofline import RooflineModel, RooflineOptions
from hisparsim.cost.sources import SOURCES, cost_model
from hisparsim.cost.terms import TERM_SOURCES, Term
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.models import model_names
from hisparsim.specs.nodes import node_names
from hisparsim.specs.scenario import Scenario

TOP_K = 2048
NO_OVERHEAD = RooflineOptions(resolve_us=0.0)
BUSY = Background(h2d_bytes_per_s=2e10, d2h_bytes_per_s=1e10)


@cache
def model_of(*overrides: str, options: RooflineOptions | None = None) -> RooflineModel:
    return RooflineModel.of(Scenario.load(overrides=overrides), options=options)


def decode(batch: int = 16, context: int = 80_000, **changes: object) -> StepLoad:
    load = StepLoad(
        num_decodes=batch,
        graph_requests=batch,
        sum_context_tokens=batch * context,
        max_context_tokens=context,
        selected_rows=batch * min(context, TOP_K),
    )
    return replace(load, **changes)


def offloaded(batch: int = 16, missed_rows: int = 270, **changes: object) -> StepLoad:
    return decode(
        batch,
        resolve=True,
        hot_requests=batch,
        hot_rows=4096,
        missed_millirows=batch * missed_rows * 1000,
        mirrored_tokens=batch,
        **changes,
    )


def prefill(tokens: int, past: int = 0, **changes: object) -> StepLoad:
    load = StepLoad(
        num_prefills=1,
        prefill_tokens=tokens,
        prefill_past_tokens=tokens * past + tokens * (tokens - 1) // 2,
        prefill_selected_rows=tokens * TOP_K if past >= TOP_K else tokens * min(TOP_K, tokens) // 2,
    )
    return replace(load, **changes)


@st.composite
def stretches(draw: st.DrawFn) -> StepLoad:
    steps = draw(st.integers(1, 12))
    decodes = draw(st.integers(1, 256))
    query = draw(st.integers(1, 4))
    eager = draw(st.booleans())
    prefill_tokens = draw(st.integers(0, 5000)) if eager else 0

    def moving(top: int) -> np.ndarray | int:
        if draw(st.booleans()):
            return draw(st.integers(0, top))
        return np.asarray(draw(st.lists(st.integers(0, top), min_size=steps, max_size=steps)), dtype=np.int64)

    return StepLoad(
        num_decodes=decodes,
        query_tokens=query,
        graph_requests=0 if eager else decodes + draw(st.integers(0, 7)),
        num_prefills=int(prefill_tokens > 0),
        prefill_tokens=prefill_tokens,
        prefill_past_tokens=prefill_tokens * draw(st.integers(0, 200_000)),
        prefill_selected_rows=prefill_tokens * draw(st.integers(1, TOP_K)),
        resolve=draw(st.booleans()),
        sum_context_tokens=draw(st.integers(0, 10**8)) + np.arange(steps) * decodes,
        max_context_tokens=draw(st.integers(1, 10**6)) + np.arange(steps),
        selected_rows=moving(256 * 4 * TOP_K),
        missed_millirows=moving(256 * TOP_K * 1000),
        staged_pages=moving(2000) if prefill_tokens else 0,
        mirrored_tokens=moving(40_000),
        write_back_bytes=moving(10**10),
        expert_tokens=draw(st.one_of(st.none(), st.just(moving(100_000)))),
    )


@settings(max_examples=200, deadline=None)
@given(stretches(), st.sampled_from([Background(), BUSY, Background(d2h_bytes_per_s=3e9)]))
def test_pricing_k_steps_at_once_equals_pricing_them_one_by_one(load, background):
    for model in (model_of(), model_of("parallel.tp=4", "parallel.dp=2", "parallel.ep=true")):
        together = model.price(load, background)
        steps = load.num_steps
        assert steps is not None
        totals = together.totals(steps)
        for index in range(steps):
            alone = model.price(load.step(index), background)
            assert isinstance(alone.total_ns, int)
            assert alone.total_ns == totals[index]
            for term in Term:
                assert alone.terms.get(term, 0) == together.series(term, steps)[index]
            assert np.broadcast_to(together.h2d_bytes, steps)[index] == alone.h2d_bytes
            assert np.broadcast_to(together.d2h_bytes, steps)[index] == alone.d2h_bytes


@settings(deadline=None)
@given(stretches())
def test_the_total_is_the_exact_sum_of_terms_that_are_never_negative(load):
    cost = model_of().price(load)
    steps = load.num_steps or 1
    terms = [cost.series(term, steps) for term in cost.terms]
    assert np.array_equal(cost.totals(steps), np.sum(terms, axis=0))
    assert all(np.all(term >= 0) for term in terms)


def test_every_model_prices_on_every_node_it_fits_and_the_memo_changes_nothing():
    for model_name in model_names():
        for node_name in node_names():
            keys = [
                f"model.preset={model_name}",
                f"node.preset={node_name}",
                "scheduler.max_model_len=100000",
            ]
            if node_name.endswith("x1"):
                keys.append("parallel.tp=1")
            model = RooflineModel.of(Scenario.load(overrides=keys))
            for load in (decode(4), prefill(512), offloaded(4)):
                first = model.price(load)
                assert 0 < first.total_ns < 60e9
                assert model.price(load) == first


def test_ideal_links_and_a_free_resolver_leave_the_price_without_offload():
    free = model_of(
        "links.gather_gb_per_s=inf", "links.h2d_gb_per_s=inf", "links.d2h_gb_per_s=inf", options=NO_OVERHEAD
    )
    assert free.price(offloaded()).total_ns == model_of().price(decode()).total_ns
    staged = prefill(753, 75_000, staged_pages=1000, mirrored_tokens=753)
    assert free.price(staged).total_ns == model_of().price(prefill(753, 75_000)).total_ns


def test_without_misses_residency_costs_its_resolver_and_nothing_else():
    plain, resolved = (model_of().price(load).total_ns for load in (decode(), decode(resolve=True)))
    assert resolved - plain == pytest.approx(21 * 14_000, rel=1e-6)


@pytest.mark.parametrize("count", [name for name in MOVING if name not in ("hot_requests", "expert_tokens")])
def test_more_of_any_count_never_makes_a_step_cheaper(count):
    base = offloaded(missed_rows=100) if count != "staged_pages" else prefill(500, 70_000)
    before = model_of().price(base).total_ns
    more = model_of().price(replace(base, **{count: getattr(base, count) * 4 + 10**6})).total_ns
    assert more >= before
    if count not in ("mirrored_tokens", "write_back_bytes"):
        assert more > before


@settings(deadline=None)
@given(st.integers(1, 255), st.integers(100, 100_000))
def test_one_more_decode_never_makes_a_step_cheaper(batch, context):
    fewer, more = (model_of().price(decode(size, context)).total_ns for size in (batch, batch + 1))
    assert more >= fewer * 0.999  # the published layer times themselves dip by 2 % between 2 and 4 tokens


def test_a_longer_prefill_never_makes_a_step_cheaper_and_a_short_one_costs_its_launches():
    lengths = [1, 16, 256, 512, 1024, 4096, 16_384, 32_768]
    totals = [model_of().price(prefill(length)).total_ns for length in lengths]
    assert totals == sorted(totals)
    assert totals[0] > 0.95 * totals[3]


def test_context_costs_decode_time_only_in_layers_that_own_an_indexer():
    shared = model_of()
    every = model_of("model.preset=glm-5", "scheduler.max_model_len=200000")
    growth = [
        model.price(decode(8, 160_000)).total_ns - model.price(decode(8, 40_000)).total_ns
        for model in (shared, every)
    ]
    assert growth[1] / growth[0] == pytest.approx(78 / 21, rel=0.01)


def test_a_mixed_step_costs_less_than_its_parts_and_more_than_the_prefill_alone():
    mixed = replace(
        prefill(2000, 50_000),
        num_decodes=16,
        sum_context_tokens=16 * 80_000,
        max_context_tokens=80_000,
        selected_rows=16 * TOP_K,
    )
    model = model_of()
    alone = model.price(prefill(2000, 50_000)).total_ns
    assert alone < model.price(mixed).total_ns < alone + model.price(decode()).total_ns


def test_decodes_are_priced_at_the_size_of_their_graph():
    assert (
        model_of().price(decode(9, graph_requests=16)).terms["moe"]
        == model_of().price(decode(16)).terms["moe"]
    )


@pytest.mark.parametrize(
    ("keys", "slower"),
    [
        (("node.preset=h100x8",), ("moe", "decode_indexer")),
        (("model.weights=bf16", "kv.gpu_kv_gib=5"), ("moe", "decode_projections")),
        (("parallel.tp=1", "parallel.dp=8", "parallel.ep=true"), ("decode_projections",)),
        (("kv.dtype=bf16",), ("decode_sparse_attention",)),
        (("node.preset=rtx-pro-6000x8", "kv.gpu_kv_gib=5"), ("all_reduce", "moe")),
    ],
)
def test_less_bandwidth_or_more_bytes_make_the_terms_slower_that_they_feed(keys, slower):
    base, changed = model_of().price(decode()).terms, model_of(*keys).price(decode()).terms
    for term in slower:
        assert changed[term] > base[term]


def test_smaller_weights_make_experts_faster_and_latencies_stay_on_every_node():
    base = model_of().price(decode()).terms
    assert model_of("model.weights=nvfp4").price(decode()).terms["moe"] < base["moe"]
    blackwell = model_of("node.preset=b200x8").price(decode()).terms
    assert blackwell["moe"] < base["moe"]
    assert blackwell["attention_latency"] == base["attention_latency"]


def test_one_gpu_needs_no_all_reduce_and_experts_over_replicas_exchange_tokens():
    single = model_of("node.preset=h200x1", "parallel.tp=1", "model.preset=tiny-dsa")
    assert single.price(decode()).terms["all_reduce"] == 0
    spread = model_of("parallel.tp=1", "parallel.dp=8", "parallel.ep=true")
    assert spread.price(decode()).terms["all_reduce"] > 0


def test_experts_shared_by_replicas_cost_by_the_tokens_of_all():
    model = model_of("parallel.tp=4", "parallel.dp=2", "parallel.ep=true")
    own = model.price(decode())
    union = model.price(decode().with_expert_tokens(32))
    assert union.terms["moe"] > own.terms["moe"]
    assert union.total_ns - own.total_ns == union.terms["moe"] - own.terms["moe"]


def test_the_overlap_and_resolve_keys_of_a_scenario_are_in_force():
    load = offloaded(missed_rows=2000)
    serial = model_of("links.overlap=0").price(load)
    assert serial.terms["hot_gather"] > model_of().price(load).terms["hot_gather"]
    slow = model_of("cost.resolve_us=28").price(load)
    assert slow.terms["resolve"] == 2 * model_of().price(load).terms["resolve"]


def test_an_eager_step_counts_the_launches_of_its_experts_once():
    model = model_of("parallel.tp=4", "parallel.dp=2", "parallel.ep=true")
    own = model.price(prefill(16))
    union = model.price(prefill(16).with_expert_tokens(64))
    assert union.terms["moe"] > own.terms["moe"]
    assert union.total_ns == own.total_ns  # launching them takes longer than either
    assert model.price(prefill(16).with_expert_tokens(16)).total_ns == own.total_ns


def test_verify_steps_cost_more_than_plain_ones_and_less_than_as_many_requests():
    model = model_of("speculation.draft_tokens=3")
    verify = decode(4, query_tokens=4, selected_rows=16 * TOP_K, sum_context_tokens=4 * 80_000)
    cost = model.price(verify)
    assert cost.terms["drafts"] > 0
    assert model.price(decode(4)).total_ns < cost.total_ns
    assert cost.total_ns - cost.terms["drafts"] < model.price(decode(16)).total_ns


def test_the_front_end_takes_longer_for_longer_prompts():
    model = model_of()
    assert 0 < model.front_end_ns(10) < model.front_end_ns(75_000)
    assert model.front_end_ns(75_000) / 1e9 == pytest.approx(0.3, rel=0.05)


def test_every_term_of_gpu_work_names_its_source():
    sources = model_of().sources()
    transfers = {Term.HOT_GATHER, Term.STAGING, Term.MIRROR}
    assert set(TERM_SOURCES) == set(Term)
    assert all(sources[term] for term in Term if term not in transfers)


def test_a_scenario_picks_its_source_and_a_source_of_later_versions_is_refused():
    assert isinstance(cost_model(Scenario.load()), RooflineModel)
    assert SOURCES
    with pytest.raises(ScenarioError, match="roofline"):
        cost_model(Scenario.load(overrides=["cost.source=measured"]))


@pytest.mark.slow
def test_pricing_a_step_takes_tens_of_microseconds():
    model, loads = model_of(), (offloaded(), prefill(753, 75_000, staged_pages=10))
    for load in loads:
        best = math.inf
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(1000):
                model.price(load)
            best = min(best, (time.perf_counter() - started) / 1000)
        assert best < 200e-6
