"""The roofline source against published figures. Each test names its source; nothing is fitted here."""

from __future__ import annotations

import csv

import pytest

from hisparsim.cost.load import StepLoad, past_tokens, selected_rows
from hisparsim.cost.roofline import RooflineModel, RooflineOptions
from hisparsim.serving.plan import PrefillChunk
from hisparsim.specs.scenario import Scenario

TOP_K = 2048
DEFAULT = RooflineOptions()
PLAIN = RooflineOptions(graph_factor=1.0)
"""Without the global factor: the plain sum of the published layer times."""


def model_of(*overrides: str, options: RooflineOptions = DEFAULT) -> RooflineModel:
    return RooflineModel.of(Scenario.load(overrides=overrides), options=options)


def decode(batch: int, context: int, *, query_tokens: int = 1, resolve: bool = False) -> StepLoad:
    return StepLoad(
        num_decodes=batch,
        query_tokens=query_tokens,
        graph_requests=batch,
        sum_context_tokens=batch * context,
        max_context_tokens=context,
        selected_rows=batch * query_tokens * min(context, TOP_K),
        resolve=resolve,
    )


def prefill(start: int, tokens: int) -> StepLoad:
    chunk = PrefillChunk(0, start, tokens, True, 0)
    return StepLoad(
        num_prefills=1,
        prefill_tokens=tokens,
        prefill_past_tokens=past_tokens(chunk),
        prefill_selected_rows=selected_rows(chunk, TOP_K),
    )


def ms(model: RooflineModel, load: StepLoad) -> float:
    return model.price(load).total_ns / 1e6


@pytest.mark.parametrize(("batch", "published_ms"), [(1, 11.4), (8, 18.1), (16, 23.3), (32, 31.0)])
def test_a_decode_step_meets_the_sum_of_measured_layer_tables_within_3_percent(batch, published_ms):
    # aiconfigurator-core 0.12 tables summed: GLM-5.3, 8xH200, no MTP, 80k context, shared expert overlapped.
    assert ms(model_of(options=PLAIN), decode(batch, 80_000)) == pytest.approx(published_ms, rel=0.03)


def test_the_published_terms_of_a_decode_step_are_met_one_by_one_within_5_percent():
    # The same sum, batch 16: attention with indexer 4.18 and without 4.33, MoE 11.99, all-reduce 1.40.
    terms = model_of(options=PLAIN).price(decode(16, 80_000)).terms
    attention = [
        "decode_projections",
        "decode_indexer",
        "decode_sparse_attention",
        "attention_latency",
    ]
    assert sum(terms[term] for term in attention) / 1e6 == pytest.approx(4.18 + 4.33, rel=0.05)
    assert terms["moe"] / 1e6 == pytest.approx(11.99, rel=0.05)
    assert terms["all_reduce"] / 1e6 == pytest.approx(1.40, rel=0.05)


def test_one_decoding_request_meets_the_published_tpot_with_and_without_hybrid_residency():
    # vLLM OpenHands figure, concurrency 1, no MTP: 10.87 ms with ordinary offload, 11.16 ms with HiSparse.
    model = model_of()
    assert ms(model, decode(1, 80_000)) == pytest.approx(10.87, rel=0.02)
    assert ms(model, decode(1, 80_000, resolve=True)) == pytest.approx(11.16, rel=0.02)


def test_one_verify_step_meets_the_published_mtp3_time_a_token():
    # vLLM OpenHands figure, concurrency 1, MTP3: 3.77 and 3.89 ms a token, 3.8 of 4 tokens accepted.
    model = model_of("speculation.draft_tokens=3")
    assert ms(model, decode(1, 80_000, query_tokens=4)) / 3.8 == pytest.approx(3.77, rel=0.04)
    resolved = ms(model, decode(1, 80_000, query_tokens=4, resolve=True))
    assert resolved / 3.8 == pytest.approx(3.89, rel=0.04)


def test_a_longer_context_costs_a_decode_step_what_the_tables_say():
    # The same sum: from 75k to 86k the batch-1 step grows by 0.12 ms, the batch-32 step by 0.40 ms.
    model = model_of(options=PLAIN)
    assert ms(model, decode(1, 86_000)) - ms(model, decode(1, 75_000)) == pytest.approx(0.12, abs=0.03)
    assert ms(model, decode(32, 86_000)) - ms(model, decode(32, 75_000)) == pytest.approx(0.40, abs=0.06)


def test_a_cold_long_prompt_takes_its_published_time_chunk_by_chunk():
    # Tables for a cold prompt of 74,160 tokens in chunks of 32,768: 8.3-9.0 s in all (8.6 with vLLM's MoE),
    # chunks of 3.4-3.8, 3.8-4.1 and 1.1-1.2 s.
    model = model_of()
    first, second, third = (
        ms(model, prefill(start, tokens)) / 1e3
        for start, tokens in ((0, 32_768), (32_768, 32_768), (65_536, 8_624))
    )
    assert 3.4 <= first <= 3.8
    assert 3.8 <= second <= 4.1
    assert 1.1 * 0.97 <= third <= 1.2
    assert first + second + third == pytest.approx(8.6, rel=0.03)


def test_a_model_with_an_indexer_in_every_layer_prefills_as_published():
    # SGLang tables, GLM-5 (78 indexers), 8,192 tokens: 822 ms with fp8 KV, 645 ms with bf16 KV.
    keys = ("model.preset=glm-5", "scheduler.max_model_len=100000")
    assert ms(model_of(*keys), prefill(0, 8192)) == pytest.approx(822, rel=0.05)
    assert ms(model_of(*keys, "kv.dtype=bf16"), prefill(0, 8192)) == pytest.approx(645, rel=0.06)


def test_any_prefill_step_takes_at_least_its_launches():
    # SGLang tables: 1.0-1.65 ms a layer for any prefill below about 1,000 tokens: 125-130 ms for 78 layers.
    model = model_of()
    assert 125 <= ms(model, prefill(0, 16)) <= 132
    # A short turn of 753 tokens behind 75,000: 149-155 ms (SGLang tables), 131-164 (vLLM, linear).
    assert 131 <= ms(model, prefill(75_000, 753)) <= 164


def test_attention_heads_padded_to_64_make_tp_useless_for_prefill_attention():
    # SGLang tables, 8,192 tokens behind 32k: 10.19 ms a layer with 8 heads, 12.00 ms with 64.
    few, many = (
        model_of(f"parallel.tp={tp}", "kv.gpu_kv_gib=5").price(prefill(32_768, 8192)).terms for tp in (8, 1)
    )
    names = ("prefill_projections", "prefill_indexer", "prefill_sparse_attention")
    assert sum(few[name] for name in names) / sum(many[name] for name in names) == pytest.approx(
        0.83, abs=0.04
    )


SERVING_CASES = [
    (1024, 1024, 4),
    (1024, 1024, 16),
    (1024, 8192, 4),
    (1024, 8192, 16),
    (8192, 1024, 4),
    (8192, 1024, 16),
]


@pytest.mark.parametrize(("isl", "osl", "concurrency"), SERVING_CASES)
def test_a_closed_loop_of_glm_5_decodes_at_the_measured_pace_within_16_percent(
    reference_dir, isl, osl, concurrency
):
    # GLM-5 on 8xH200, SGLang, TP8. In a closed loop each request meets the prefills of the others once during
    # its own decode; lengths are 80-100 % of nominal.
    with (reference_dir / "reference" / "glm5_h200_serving.csv").open() as file:
        measured = {
            (int(row["isl"]), int(row["osl"]), int(row["concurrency"])): float(row["mean_tpot_ms"])
            for row in csv.DictReader(file)
        }
    model = model_of("model.preset=glm-5", "scheduler.max_model_len=100000")
    prompt, output = round(0.9 * isl), round(0.9 * osl)
    step = ms(model, decode(concurrency, prompt + output // 2))
    interference = (concurrency - 1) * ms(model, prefill(0, prompt)) / output
    assert step + interference == pytest.approx(measured[isl, osl, concurrency], rel=0.16)
