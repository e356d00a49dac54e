"""Drawn traces have the shape that was asked for, the same every time."""

from __future__ import annotations

import json
import lzma
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_traces import TraceError, closed_loop, conversations, load, poisson
from hisparsim_traces.bundled import BUNDLED, description_of, pack, unpack
from hisparsim_traces.draws import gaps, stream
from hisparsim_traces.reuse import ideal_reuse
from hisparsim_traces.statistics import dispersion, gap_cv
from hisparsim_traces.synth.description import parse_description
from hisparsim_traces.synth.draw import draw_arrivals, synthesise
from hisparsim_traces.synth.fit import fit
from hisparsim_traces.synth.fit_report import fit_report


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_trace_is_drawn_again_byte_for_byte(name: str) -> None:
    stored = files("hisparsim_traces").joinpath("data", f"{name}.trace.xz").read_bytes()
    assert pack(BUNDLED[name]()) == lzma.decompress(stored)


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_trace_is_sound_and_packs_back_to_itself(name: str) -> None:
    trace = load(name)
    trace.check()
    assert unpack(pack(trace)).sha256 == trace.sha256
    assert trace.format == "synthetic"


def test_openhands_turns_have_the_published_shape() -> None:
    trace = load("openhands")
    assert trace.num_requests == 32 * 13
    first = trace.turn == 0
    assert set(trace.input_tokens[first]) == {74_160}
    parents = trace.parent[~first]
    grown = trace.input_tokens[~first] - trace.input_tokens[parents] - trace.output_tokens[parents]
    assert set(grown) == {753}
    assert (trace.shared_prefix_tokens[~first] == trace.input_tokens[parents] + 220).all()
    assert set(trace.output_tokens) == {220}
    other = conversations(2, 3, 74_160, 753, 220, later_includes_output=True)
    assert other.input_tokens[:3].tolist() == [74_160, 74_913, 75_666]


def test_conversation_has_the_published_reuse_and_long_context_fits_its_window() -> None:
    conversation = load("conversation")
    assert conversation.num_requests == 1500
    reuse = ideal_reuse(conversation).blocks
    assert reuse == pytest.approx(0.366, abs=0.03)
    assert conversation.input_tokens.mean() == pytest.approx(12_035, rel=0.05)
    long = load("long-context")
    assert (long.input_tokens + long.output_tokens).max() <= 142_000
    assert long.input_tokens.min() >= 30_000


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 300), st.floats(0.01, 1000))
def test_poisson_is_a_function_of_its_seed(seed: int, n: int, rate: float) -> None:
    a, b = poisson(n, rate, (1, 500), (1, 50), seed), poisson(n, rate, (1, 500), (1, 50), seed)
    a.check()
    assert a.sha256 == b.sha256
    assert a.num_requests == n
    if n > 5:
        assert poisson(n, rate, (1, 500), (1, 50), seed + 1).sha256 != a.sha256


def test_poisson_has_its_rate_and_a_cv_of_one() -> None:
    trace = poisson(20_000, 5.0, 100, 10, seed=3)
    assert trace.num_requests / trace.span_s == pytest.approx(5.0, rel=0.03)
    assert gap_cv(trace.arrival_s) == pytest.approx(1.0, abs=0.03)
    assert dispersion(trace.arrival_s, 10) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("process", ["gamma", "weibull"])
@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_renewal_gaps_have_mean_one_and_their_cv(process: str, cv: float) -> None:
    drawn = gaps(stream(1, process), 400_000, process, cv)
    assert drawn.mean() == pytest.approx(1.0, rel=0.02)
    assert drawn.std() == pytest.approx(cv, rel=0.05)


BASE = {
    "name": "x",
    "num_requests": 20_000,
    "arrivals": {"process": "poisson", "rate_per_s": 4.0},
    "lengths": {"input_tokens": [[0, 10], [1, 5000]], "output_tokens": [[0, 1], [1, 90]], "correlation": 0.6},
}


def test_on_off_and_varying_rates_keep_the_mean_rate() -> None:
    on_off = parse_description(
        json.dumps({**BASE, "arrivals": {"process": "on-off", "rate_per_s": 4.0, "on_s": 2, "off_s": 9}})
    )
    drawn = draw_arrivals(on_off.arrivals, 40_000, seed=1)
    assert len(drawn) / drawn[-1] == pytest.approx(4.0, rel=0.1)
    bursty = gap_cv(drawn)
    assert bursty is not None and bursty > 2
    profile = [[0, 0.5], [1000, 1.5]]
    varying = parse_description(json.dumps({**BASE, "arrivals": {"rate_per_s": 4.0, "profile": profile}}))
    times = draw_arrivals(varying.arrivals, 8000, seed=1)
    assert (times < 1000).sum() == pytest.approx(2000, rel=0.1)
    assert ((times >= 1000) & (times < 1500)).sum() == pytest.approx(3000, rel=0.1)


def test_lengths_follow_their_knots_and_their_correlation() -> None:
    law = parse_description(json.dumps(BASE))
    trace = synthesise(law)
    assert trace.input_tokens.min() >= 10 and trace.input_tokens.max() <= 5000
    assert np.median(trace.input_tokens) == pytest.approx(
        np.expm1((np.log1p(10) + np.log1p(5000)) / 2), rel=0.05
    )
    ranks = [np.argsort(np.argsort(column)) for column in (trace.input_tokens, trace.output_tokens)]
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(6 / np.pi * np.arcsin(0.3), abs=0.03)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"arrivals": {"rate_per_s": -1}}, "arrivals.rate_per_s"),
        ({"arrivals": {"process": "bursts"}}, "arrivals.process"),
        ({"arrivals": {"profile": [[5, 1]]}}, "profile steps start at 0"),
        ({"lengths": {"input_tokens": [[0, 5]], "output_tokens": [[0, 1], [1, 2]]}}, "lengths.input_tokens"),
        ({"lengths": {"input_tokens": [[0, 5], [1, 2]], "output_tokens": [[0, 1], [1, 2]]}}, "do not fall"),
        ({"speed": 3}, "speed"),
    ],
)
def test_a_bad_description_names_its_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(TraceError, match=field):
        parse_description(json.dumps({**BASE, **change}))
    with pytest.raises(TraceError, match="is not JSON"):
        parse_description("{")


@pytest.mark.parametrize("name", ["conversation", "tool-agent"])
def test_a_fit_comes_near_its_trace(name: str) -> None:
    trace = load(name)
    law = fit(trace)
    report = fit_report(trace, law)
    assert report["input_tokens_ks"] < 0.06
    assert report["output_tokens_ks"] < 0.06
    assert report["arrivals"] == "poisson"
    real, drawn = report["block_reuse"]
    assert drawn == pytest.approx(real, abs=0.06)
    assert parse_description(law.model_dump_json()) == law


def test_a_fit_of_sessions_keeps_turns_and_reuse() -> None:
    trace = load("million-token")
    report = fit_report(trace, fit(trace))
    real, drawn = report["requests_a_session"]
    assert drawn == pytest.approx(real, rel=0.4)
    real, drawn = report["token_reuse"]
    assert drawn == pytest.approx(real, abs=0.05)


def test_a_fit_holds_no_row() -> None:
    trace = load("conversation")
    text = fit(trace).model_dump_json()
    assert len(text) < 20_000
    with pytest.raises(TraceError, match="at least 20"):
        fit(trace.head(19))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson(0, 1.0, 5, 5, 0), "num_requests 0"),
        (lambda: poisson(5, 0.0, 5, 5, 0), "rate_per_s 0"),
        (lambda: poisson(5, 1.0, (9, 3), 5, 0), "input_tokens"),
        (lambda: closed_loop(5, [1, 2], 5), "2 lengths given, 5 needed"),
        (lambda: closed_loop(5, 0, 5), "at least 1 token"),
        (lambda: conversations(1, 2, 5, 3, 9, later_includes_output=True), "includes the previous output"),
        (lambda: conversations(1, 2, 5, 3, 9, think_s=-1.0), "think_s -1"),
    ],
)
def test_impossible_shapes_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(TraceError, match=message):
        call()


def test_descriptions_of_bundled_traces_say_where_their_figures_come_from() -> None:
    for name in BUNDLED:
        if name != "openhands":
            assert parse_description(description_of(name)).source
