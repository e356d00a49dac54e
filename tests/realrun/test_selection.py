"""Selections under a profile: the profile's misses, whatever asks for them and in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparsim.locality.profile import load_profile
from hisparsim.serving.request import RequestSpec
from hisparsim_realrun.content import Content
from hisparsim_realrun.errors import RealRunError
from hisparsim_realrun.hot import HotBuffers
from hisparsim_realrun.selection import ProfileSelection
from hisparsim_realrun.work import Span

TOP_K = 128
UNITS = 4


def selection(context: int, seed: int = 0) -> tuple[ProfileSelection, Content]:
    content = Content(256, seed)
    content.register(RequestSpec(1, context, 10_000))
    return ProfileSelection(load_profile("glm-5.1", TOP_K), content, UNITS, seed), content


def missed_share(context: int, hot_rows: int, num_steps: int) -> float:
    """Exact LRU over the process's own selections, after a warm-up, in coherent units."""
    process, _ = selection(context)
    keys = process.keys((Span(1, 0, context + num_steps, True, 0, 0),))
    hot = HotBuffers(hot_rows, context + num_steps + 1)
    missed = looked_up = 0
    for step in range(num_steps):
        queries = process.queries(Span(1, context + step, 1, False, 0, 1))
        for unit in range(process.num_incoherent, UNITS):
            score = keys[unit, : context + step] @ queries[unit, 0]
            chosen = torch.topk(score, TOP_K - 1).indices.sort().values.numpy()
            found = hot.look_up(unit, 0, chosen)
            if step >= num_steps // 2:
                missed += int(found.missed.sum())
                looked_up += len(chosen)
    return missed / looked_up


@pytest.mark.parametrize(("context", "hot_rows"), [(2048, 256), (2048, 384), (6144, 256)])
def test_hot_buffers_miss_as_the_profile_says(context, hot_rows):
    profile = load_profile("glm-5.1", TOP_K)
    grown = context + 525  # the mean context of the steps that are counted
    coherent = float(profile.curve(np.array([hot_rows / TOP_K]), np.array([grown / TOP_K]))[0])
    assert missed_share(context, hot_rows, 700) == pytest.approx(coherent, rel=0.2)


def test_a_query_depends_on_its_request_and_step_alone():
    first, _ = selection(100)
    again, _ = selection(100)
    in_order = [first.queries(Span(1, 100 + step, 1, False, 0, 1)) for step in range(30)]
    together = again.queries(
        Span(1, 95, 20, True, 0, 0)
    )  # recomputed by a prefill: 5 prompt tokens, 15 others
    assert torch.equal(together, torch.cat(in_order[:15], 1))
    verified_again = first.queries(Span(1, 125, 3, False, 0, 1))
    assert torch.equal(verified_again, torch.cat(in_order[25:28], 1))


def test_equal_content_has_equal_keys_and_other_content_others():
    content = Content(256, 0)
    shared = np.arange(3, dtype=np.int64)
    for request_id, keys in ((1, shared), (2, shared), (3, shared + 7)):
        content.register(RequestSpec(request_id, 192, 10, keys))
    process = ProfileSelection(load_profile("glm-5.1", TOP_K), content, UNITS, 0)
    one, two, three = (process.keys((Span(r, 10, 150, True, 0, 0),)) for r in (1, 2, 3))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    ids = [content.token_ids(request_id, 10, 150, 160).tolist() for request_id in (1, 2, 3)]
    assert ids[0] == ids[1] != ids[2]
    assert content.token_ids(1, 10, 150, 100).tolist()[:90] == ids[0][:90]
    assert content.token_ids(1, 10, 150, 100).tolist()[90:] != ids[0][90:]


def test_a_profile_that_is_known_by_its_misses_only_is_refused():
    scaled = load_profile("glm-5.1", TOP_K).fitted_to_counters(
        hits=90, misses=10, context_tokens=100_000, hot_rows=4096
    )
    with pytest.raises(RealRunError, match="generates no selections"):
        ProfileSelection(scaled, Content(256, 0), UNITS, 0)


def test_recorded_selections_are_played_back_under_another_policy(tmp_path, bench, closed_loop):
    from dataclasses import replace

    from hisparsim_realrun.recorded import RecordedSelections, SelectionRecorder
    from hisparsim_traces.topk import TopkReader

    path, lengths = tmp_path / "own.topk", [(150, 12), (90, 9)]
    case = bench("gpu-only", 40)
    top_k = case.model.index_top_k
    num_units = 2

    def record(executor):
        executor.recorder = SelectionRecorder(path, top_k=top_k, num_units=num_units, model="tiny")

    recorded = case.run(closed_loop(lengths, 2), change=record)
    recorded.executor.close()
    decoded = sum(len(batch) for batch in TopkReader(path))
    # the last token of each request is answered, never decoded
    assert decoded == num_units * sum(output - 1 for _, output in lengths)

    def replay(executor):
        executor.recorded = RecordedSelections(path, top_k=top_k, num_units=num_units)

    other = replace(bench("host-resident", 60), seed=case.seed)
    again = other.run(closed_loop(lengths, 2), change=replay)
    assert again.differences(recorded) == []
    with pytest.raises(RealRunError, match="the model selects 64 in 3"):
        RecordedSelections(path, top_k=top_k, num_units=3)
    with pytest.raises(RealRunError, match="selections of"):
        RecordedSelections(tmp_path / "none.topk", top_k=top_k, num_units=3)
