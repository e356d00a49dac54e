"""Loads: the aggregates of a plan, counted the slow way too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.cost.load import LoadError, StepLoad, past_tokens, selected_rows
from hisparsim.serving.plan import DecodeBatch, PrefillChunk, StepPlan, WriteBack

TOP_K = 128


def decode_batch(contexts: list[int], resident: list[int], query_tokens: int = 1) -> DecodeBatch:
    context = np.asarray(contexts, dtype=np.int64)
    pages = -(-context // 64)
    return DecodeBatch(
        tuple(range(len(contexts))),
        context,
        pages,
        np.minimum(np.asarray(resident, dtype=np.int64), pages),
        query_tokens,
        256,
    )


CHUNKS = st.builds(
    PrefillChunk,
    request_id=st.integers(0, 9),
    start_token=st.integers(0, 1000),
    num_tokens=st.integers(1, 500),
    is_last=st.booleans(),
    staged_pages=st.integers(0, 20),
)


@given(CHUNKS)
def test_a_chunk_is_counted_as_token_by_token(chunk):
    positions = range(chunk.start_token, chunk.start_token + chunk.num_tokens)
    assert past_tokens(chunk) == sum(positions)
    assert selected_rows(chunk, TOP_K) == sum(min(position + 1, TOP_K) for position in positions)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 80)), max_size=8),
    st.lists(CHUNKS, max_size=4),
    st.integers(1, 4),
)
def test_the_load_of_a_plan_adds_up_its_decodes_and_chunks(requests, chunks, query_tokens):
    contexts = [context for context, _ in requests]
    decodes = decode_batch(contexts, [pages for _, pages in requests], query_tokens)
    actions = (WriteBack(1, 0, 0, 1, np.zeros(2, np.int64), 777),)
    plan = StepPlan(0, decodes, tuple(chunks), actions, 11, None if chunks else 8)
    load = StepLoad.of(plan, top_k=TOP_K, resolve=True, missed_millirows=5)
    load.check()
    assert load.num_steps is None
    assert load.num_tokens == plan.num_tokens
    assert load.sum_context_tokens == sum(contexts)
    assert load.max_context_tokens == max(contexts, default=0)
    assert load.selected_rows == query_tokens * sum(min(context, TOP_K) for context in contexts)
    assert load.hot_requests == sum(
        resident < pages for resident, pages in zip(decodes.resident_pages, decodes.pages, strict=True)
    )
    assert load.prefill_tokens == sum(chunk.num_tokens for chunk in chunks)
    assert load.prefill_past_tokens == sum(past_tokens(chunk) for chunk in chunks)
    assert load.staged_pages == sum(chunk.staged_pages for chunk in chunks)
    assert (load.write_back_bytes, load.mirrored_tokens, load.missed_millirows) == (777, 11, 5)
    assert load.graph_requests == (0 if chunks else 8)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 3))
def test_a_stretch_is_the_loads_of_its_steps_in_a_row(contexts, num_steps, query_tokens):
    batch = decode_batch(contexts, [0] * len(contexts), query_tokens)
    missed = np.arange(num_steps) * 7
    hot = len(contexts)
    stretch = StepLoad.stretch(
        batch,
        num_steps,
        top_k=TOP_K,
        resolve=True,
        graph_requests=8,
        hot_requests=hot,
        missed_millirows=missed,
        mirrored_tokens=hot,
    )
    stretch.check()
    assert stretch.num_steps == num_steps
    for step in range(num_steps):
        grown = [context + step * query_tokens for context in contexts]
        plan = StepPlan(0, decode_batch(grown, [0] * hot, query_tokens), (), (), hot, 8)
        assert stretch.step(step) == StepLoad.of(
            plan, top_k=TOP_K, resolve=True, missed_millirows=int(missed[step])
        )


def test_impossible_loads_are_refused():
    batch = decode_batch([100], [0])
    with pytest.raises(LoadError, match="stretch"):
        StepLoad.stretch(batch, 0, top_k=TOP_K, resolve=False, graph_requests=1)
    with pytest.raises(LoadError, match="negative"):
        StepLoad(prefill_tokens=-1).check()
    with pytest.raises(LoadError, match="length"):
        StepLoad(sum_context_tokens=np.zeros(2, int), max_context_tokens=np.zeros(3, int)).check()


def test_the_experts_see_the_tokens_of_all_replicas_where_they_are_shared():
    assert StepLoad(num_decodes=2).with_expert_tokens(9).expert_tokens == 9
