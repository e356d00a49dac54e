"""Content keys of pages: equal keys exactly where the trace says that tokens are equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import tiny

from hisparsim import simulate
from hisparsim.des.identity import PageIdentity
from hisparsim_traces import Trace, conversations
from hisparsim_traces.synth.assemble import synthetic_trace

PAGE = 64


def shared_pages(first: np.ndarray, second: np.ndarray) -> int:
    """Leading pages with equal keys."""
    length = min(len(first), len(second))
    equal = np.append(first[:length] == second[:length], False)
    return int(np.argmin(equal))


def keys_of(trace: Trace) -> list[np.ndarray]:
    identity = PageIdentity(trace, PAGE)
    return [identity.keys(row) for row in range(trace.num_requests)]


@settings(max_examples=80, deadline=None)
@given(
    block_tokens=st.sampled_from([16, 64, 512]),
    prompts=st.tuples(st.integers(1, 3_000), st.integers(1, 3_000)),
    share=st.integers(0, 3_000),
    output=st.integers(1, 300),
)
def test_hash_blocks_share_whole_pages_of_the_common_prefix(
    block_tokens: int, prompts: tuple[int, int], share: int, output: int
) -> None:
    counts = [-(-prompt // block_tokens) for prompt in prompts]
    common = min(share // block_tokens, *counts)
    ids = [*range(counts[0]), *range(common), *range(10_000, 10_000 + counts[1] - common)]
    trace = synthetic_trace(
        "two", np.zeros(2), np.array(prompts), np.full(2, output),
        blocks=(block_tokens, np.array([0, counts[0], sum(counts)]), np.array(ids)),
    )  # fmt: skip
    first, second = keys_of(trace)
    for keys, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert len(keys) == (prompt + output) // PAGE
        assert len(np.unique(keys)) == len(keys)
    tokens = common * block_tokens
    expected = min(tokens // PAGE, *(prompt // PAGE for prompt in prompts))
    assert shared_pages(first, second) == expected
    assert not set(first[expected:].tolist()) & set(second[expected:].tolist())


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(1, 500),
    later=st.integers(1, 300),
    output=st.integers(1, 300),
    turns=st.integers(2, 5),
)
def test_a_turn_shares_exactly_its_parents_whole_context(
    first: int, later: int, output: int, turns: int
) -> None:
    trace = conversations(2, turns, first, later, output, seed=1)
    keys = keys_of(trace)
    for row in range(trace.num_requests):
        parent = int(trace.parent[row])
        if parent >= 0:
            context = int(trace.input_tokens[parent] + trace.output_tokens[parent])
            assert shared_pages(keys[parent], keys[row]) == context // PAGE
    other = set(np.concatenate(keys[turns:]).tolist())
    assert not other & set(np.concatenate(keys[:turns]).tolist())


def test_the_output_pages_of_a_hashed_turn_carry_the_keys_of_the_next_turns_prompt() -> None:
    """Where both have hash blocks, the next prompt's blocks say what the output was."""
    trace = synthetic_trace(
        "session", np.array([0.0, np.nan]), np.array([128, 320]), np.array([128, 10]),
        session=np.zeros(2, np.int64), turn=np.arange(2), parent=np.array([-1, 0]),
        think_s=np.array([np.nan, 0.0]), shared_prefix_tokens=np.zeros(2, np.int64),
        blocks=(64, np.array([0, 2, 7]), np.array([0, 1, 0, 1, 2, 3, 4])),
    )  # fmt: skip
    parent, child = keys_of(trace)
    assert shared_pages(parent, child) == 4


def test_a_prompt_cut_short_shares_what_is_left_of_it_and_no_later_page() -> None:
    """Its output stands where the longer prompt goes on, so those pages hold other tokens."""
    trace = synthetic_trace(
        "cut", np.zeros(2), np.full(2, 640), np.full(2, 128),
        blocks=(64, np.array([0, 10, 20]), np.array([*range(10)] * 2)),
    )  # fmt: skip
    identity = PageIdentity(trace, PAGE)
    whole, cut = identity.keys(0), identity.keys(1, 320)
    assert len(cut) == (320 + 128) // PAGE
    assert shared_pages(whole, cut) == 5
    assert not set(whole.tolist()) & set(cut[5:].tolist())


def test_a_turn_shares_only_what_is_left_of_its_parents_cut_prompt() -> None:
    trace = conversations(1, 2, 640, 64, 128, seed=1)
    identity = PageIdentity(trace, PAGE)
    parent = identity.keys(0, 320)
    assert shared_pages(parent, identity.keys(1)) == 5


def test_blocks_that_fit_no_page_share_nothing() -> None:
    trace = synthetic_trace(
        "odd", np.zeros(2), np.full(2, 480), np.full(2, 5),
        blocks=(48, np.array([0, 10, 20]), np.array([*range(10)] * 2)),
    )  # fmt: skip
    first, second = keys_of(trace)
    assert shared_pages(first, second) == 0


@pytest.mark.parametrize("policy", ["gpu-only", "prefix-offload", "hybrid"])
def test_a_run_finds_the_prefixes_that_the_keys_promise(policy: str) -> None:
    """With a pool that holds everything each later turn computes only what is new, and its last page."""
    trace = conversations(2, 4, 640, 100, 92, think_s=1.0, seed=1)
    requests = simulate(tiny(f"policy.name={policy}"), trace).requests
    for row in np.flatnonzero(trace.parent >= 0).tolist():
        context = int(trace.input_tokens[row] - 100)
        assert context // PAGE * PAGE - PAGE <= requests["hit_tokens"][row] <= context
    assert not requests["hit_tokens"][trace.parent < 0].any()
