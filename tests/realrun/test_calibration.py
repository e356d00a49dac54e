"""The calibration: fits, the file, the cost source that reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.cli.calibrate import how_to_use
from hisparsim.cost.calibrated import CalibratedModel
from hisparsim.cost.calibration_file import (
    FEATURES,
    CalibratedLinks,
    Calibration,
    CalibrationError,
    Fit,
    PartFit,
    Phase,
    read_calibration,
    write_calibration,
)
from hisparsim.cost.link_rates import link_rates
from hisparsim.cost.load import MOVING, StepLoad
from hisparsim.cost.sources import cost_model
from hisparsim.cost.terms import Term
from hisparsim.des.simulate import simulate
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.models import load_model
from hisparsim.specs.scenario import Scenario
from hisparsim_realrun.calibration import calibrate, fitted, idle_start_ns, prediction_ns, probe_links
from hisparsim_realrun.calibration_fit import PARTS, fit_part, fit_parts
from hisparsim_realrun.calibration_probe import NOT_IDLE, StepSamples, pressed_gib, probes_of, run_listening
from hisparsim_realrun.options import RunOptions
from hisparsim_realrun.validation_workloads import base_scenario, workloads
from hisparsim_traces import closed_loop, poisson

SETTINGS = ["model.preset=tiny-dsa", "node.preset=h200x1", "parallel.tp=1", "kv.dtype=bf16"]


def made_up(**changes: object) -> Calibration:
    """A calibration of round numbers."""
    fit = Fit(1000.0, (1, 8, 64), (10.0, 20.0, 300.0), {"sum_context_tokens": 0.5, "missed_rows": 7.25})
    mixed = replace(fit, linear_ns={"prefill_past_tokens": 0.25, "staged_pages": 900.0})
    parts = {
        name: PartFit(shape.decode, shape.prefill, {Phase.DECODE: fit, Phase.MIXED: mixed})
        for name, shape in PARTS.items()
    }
    made = Calibration(
        device="cpu",
        machine={"name": "made up"},
        versions={},
        date="2026-01-01",
        model=load_model("tiny-dsa").model_dump(mode="json", exclude={"name"}),
        row_format="bf16",
        num_ranks=1,
        uses_graphs=False,
        parts=parts,
        links=CalibratedLinks(4e9, 5e9, 2e9, 2.5e9, 1e9),
        notes=("made up",),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def scenario_of(path: Path, *overrides: str) -> Scenario:
    return Scenario.load(None, [*SETTINGS, f"cost.source=calibration:{path}", *overrides])


def random_loads(count: int, seed: int) -> list[StepLoad]:
    rng = np.random.default_rng(seed)
    loads = []
    for _ in range(count):
        prefill = int(rng.integers(0, 3)) * int(rng.integers(1, 256))
        decodes = int(rng.integers(1, 9))
        loads.append(
            StepLoad(
                num_decodes=decodes,
                num_prefills=int(prefill > 0),
                prefill_tokens=prefill,
                prefill_past_tokens=prefill * int(rng.integers(0, 200)),
                sum_context_tokens=decodes * int(rng.integers(1, 500)),
                missed_millirows=int(rng.integers(0, 50_000)),
                mirrored_tokens=decodes + prefill,
                resolve=True,
            )
        )
    return loads


# -- the file and the source ------------------------------------------------------------------------


def test_a_calibration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_calibration(made_up(), tmp_path / "c.json")
    assert read_calibration(tmp_path / "c.json") == made_up()


def test_a_scenario_names_its_calibration_and_keeps_it_through_json(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_calibration(made_up(), path)
    scenario = scenario_of(path)
    assert isinstance(cost_model(scenario), CalibratedModel)
    again = Scenario.from_values(scenario.model_dump(mode="json"))
    assert again.cost == scenario.cost
    rates = link_rates(scenario)
    assert (rates.h2d, rates.d2h, rates.gather, rates.both) == (4e9, 5e9, 1e9, 4.5e9)
    other = scenario.with_overrides(["cost.source=roofline"])
    assert not isinstance(cost_model(other), CalibratedModel)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "does not exist"), ("{}", "not a calibration file"), ("nonsense", "cannot be read")],
)
def test_a_file_that_is_no_calibration_is_refused_in_one_line(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalibrationError, match=said) as refusal:
        cost_model(scenario_of(path))
    assert "\n" not in str(refusal.value)


def test_a_calibration_of_another_model_row_format_or_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_calibration(made_up(), path)
    for override, said in (
        ("model.preset=glm-5.3", "num_layers"),
        ("kv.dtype=fp8_ds_mla", "rows of bf16"),
        ("parallel.tp=2", "ranks"),
    ):
        with pytest.raises(ScenarioError, match=said):
            cost_model(scenario_of(path, "node.preset=h200x8", override))
    with pytest.raises(CalibrationError, match="name the file"):
        cost_model(Scenario.load(None, [*SETTINGS, "cost.source=calibration"]))


def test_an_unknown_feature_lists_the_known_ones() -> None:
    with pytest.raises(CalibrationError, match="sum_context_tokens"):
        Fit(0.0, (), (), {"weather": 1.0})


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(2, 40))
def test_many_steps_priced_at_once_cost_what_single_ones_cost(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    model = CalibratedModel(made_up(), token_bytes=1152 * 4)
    counts = {
        name: rng.integers(0, 100_000, steps)
        for name in MOVING
        if name not in ("staged_pages", "expert_tokens")
    }
    for prefill in (0, 37):
        load = StepLoad(
            num_decodes=5, num_prefills=int(prefill > 0), prefill_tokens=prefill, resolve=True, **counts
        )
        together = model.price(load)
        for place in range(steps):
            alone = model.price(load.step(place))
            assert alone.total_ns == together.totals(steps)[place]
            assert alone.total_ns == sum(alone.terms.values())
            for term in alone.terms:
                assert alone.terms[term] == together.series(term, steps)[place]


def test_terms_of_mixed_steps_are_split_by_tokens_and_add_up() -> None:
    model = CalibratedModel(made_up(), token_bytes=1)
    cost = model.price(StepLoad(num_decodes=3, num_prefills=1, prefill_tokens=9, resolve=True))
    decode, prefill = cost.terms[Term.DECODE_PROJECTIONS], cost.terms[Term.PREFILL_PROJECTIONS]
    assert prefill == pytest.approx(3 * decode, abs=2)


def test_graph_steps_cost_what_their_padded_batch_costs() -> None:
    padded = CalibratedModel(made_up(uses_graphs=True), token_bytes=1)
    plain = CalibratedModel(made_up(), token_bytes=1)
    load = StepLoad(num_decodes=5, graph_requests=8)
    assert padded.price(load).total_ns > plain.price(load).total_ns
    assert plain.price(load).total_ns == plain.price(replace(load, graph_requests=0)).total_ns


# -- fits -------------------------------------------------------------------------------------------


def test_every_term_belongs_to_exactly_one_part() -> None:
    terms = [term for shape in PARTS.values() for term in shape.terms]
    assert sorted(terms) == sorted(Term)
    assert all(name in FEATURES for shape in PARTS.values() for name in shape.features)


def test_a_fit_finds_the_coefficients_behind_exact_times() -> None:
    loads = random_loads(300, seed=1)
    shape = PARTS["hot_gather"]
    exact = np.array([20_000.0 * (load.missed_millirows > 0) + 3.0 * load.missed_millirows for load in loads])
    fit = fit_part(shape, loads, exact)
    assert fit.linear_ns["missed_rows"] == pytest.approx(3000.0, rel=1e-3)
    assert fit.median_error < 1e-3
    assert abs(fit.sum_error) < 1e-3


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_fit_is_never_negative_and_keeps_the_measured_sum_in_spite_of_pauses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = random_loads(200, seed)
    shape = PARTS["staging"]
    exact = np.array([50.0 * load.prefill_past_tokens + 9_000.0 * load.num_decodes for load in loads])
    measured = exact * rng.lognormal(0.0, 0.05, len(loads))
    measured[rng.integers(0, len(loads), 4)] += 5e6  # the machine was elsewhere
    fit = fit_part(shape, loads, measured)
    assert fit.constant_ns >= 0
    assert all(ns >= 0 for ns in fit.linear_ns.values())
    predicted = sum(
        fit.constant_ns + sum(ns * float(FEATURES[name](load)) for name, ns in fit.linear_ns.items())
        for load in loads
    )
    assert predicted == pytest.approx(measured.sum(), rel=1e-6)


def test_a_curve_over_tokens_bends_where_the_times_bend() -> None:
    loads = [StepLoad(num_decodes=0, num_prefills=1, prefill_tokens=n) for n in range(1, 257)] * 2
    times = np.array([max(100_000.0, 2_000.0 * load.num_tokens) for load in loads])
    fit = fit_part(PARTS["moe"], loads, times)
    curve = fit.curve()
    assert curve is not None
    assert curve(4) == pytest.approx(100_000, rel=0.05)
    assert curve(256) == pytest.approx(512_000, rel=0.05)


def test_kinds_of_steps_that_were_hardly_seen_have_no_fit_of_their_own() -> None:
    loads = tuple(StepLoad(num_decodes=1 + number % 8) for number in range(100))
    zeros = np.zeros(len(loads), np.int64)
    samples = StepSamples(loads, dict.fromkeys(Term, zeros + 500), zeros + 9000, zeros, zeros - 1)
    parts = fit_parts(samples)
    assert set(parts["moe"].fits) == {Phase.DECODE}


# -- probes -----------------------------------------------------------------------------------------


def test_probes_cover_the_scenario_and_are_none_of_the_validated_workloads(tmp_path: Path) -> None:
    base = base_scenario("cpu", tmp_path)
    probes = probes_of(base)
    assert {probe.users for probe in probes} >= {1, base.scheduler.max_num_seqs}
    hashes = {probe.trace().sha256 for probe in probes}
    assert len(hashes) == len(probes)
    assert not hashes & {
        workload.make(2.0, number).sha256
        for workload in workloads("cpu")
        for number in range(workload.num_rounds)
    }
    for probe in probes:
        trace = probe.trace()
        assert (trace.input_tokens + trace.output_tokens).max() <= base.scheduler.max_model_len
    assert 0 < pressed_gib(base) < base.kv.gpu_kv_gib


@pytest.mark.slow
def test_calibrating_this_machine_predicts_the_sum_of_its_own_steps(tmp_path: Path) -> None:
    base = base_scenario("cpu", tmp_path)
    run = calibrate(base, RunOptions(threads=1), scale=0.05)
    assert {"projections", "loop", "decode_indexer"} <= set(run.calibration.parts)
    assert run.links.links.h2d > 1e6
    write_calibration(run.calibration, tmp_path / "c.json")
    scenario = base.with_overrides([f"cost.source=calibration:{tmp_path / 'c.json'}"])
    model = cost_model(scenario)
    assert isinstance(model, CalibratedModel)
    predicted = sum(int(ns.sum()) for ns in prediction_ns(model, run.samples).values())
    measured = sum(int(ns.sum()) for ns in run.samples.terms_ns.values())
    assert predicted == pytest.approx(measured, rel=0.02)
    assert all(row["num_steps"] > 0 for row in run.table())
    assert model.sources()[Term.MOE]


def test_the_settings_that_calibrate_ends_with_are_those_of_the_slice(tmp_path: Path) -> None:
    (tmp_path / "slices").mkdir()
    base = base_scenario("cpu", tmp_path / "slices")
    shown = how_to_use(base, tmp_path / "c.json").split()
    settings = [word for word in shown if word != "--set" and not word.startswith("cost.source")]
    assert f"cost.source=calibration:{tmp_path / 'c.json'}" in shown
    again = Scenario.load(None, [*settings, "kv.hot_rows=128"])
    assert again.model_spec.model_dump(exclude={"name"}) == base.model_spec.model_dump(exclude={"name"})
    assert (again.row_format, again.parallel.tp) == (base.row_format, base.parallel.tp)


def test_samples_carry_the_load_and_the_time_of_every_step(tmp_path: Path) -> None:
    base = base_scenario("cpu", tmp_path).with_overrides(["workload.concurrency=2", "policy.name=hybrid"])
    trace = probes_of(base)[0].trace().head(2)
    run, samples = run_listening(base, trace, RunOptions(threads=1))
    assert len(samples) == run.result.num_steps
    prefilled = sum(load.prefill_tokens for load in samples.loads)
    assert prefilled == int(run.result.steps["prefill_tokens"].sum())
    whole = sum(int(ns.sum()) for ns in samples.terms_ns.values())
    assert whole == pytest.approx(int(samples.duration_ns.sum()), rel=0.02)


def test_an_idle_engine_starts_as_much_later_as_was_measured(tmp_path: Path) -> None:
    base = base_scenario("cpu", tmp_path).with_overrides(["policy.name=gpu-only"])
    trace = poisson(30, 3.0, (1, 200), (4, 8), 5)
    run, samples = run_listening(base, trace, RunOptions(threads=1))
    idled = samples.idled_ns != NOT_IDLE
    assert idled[0]
    assert 10 < int(idled.sum()) < 30
    assert np.all(samples.idled_ns[idled] >= 0)
    starts = run.result.steps["start_ns"][idled]
    arrivals = run.result.requests["arrival_ns"]
    assert np.array_equal(
        starts - samples.idled_ns[idled], arrivals[arrivals.searchsorted(starts, "right") - 1]
    )
    # Steps that take 4 ms more than the model says after idling, on a machine that is a tenth slower.
    calibration = fitted(base, RunOptions(threads=1), samples, probe_links(base, RunOptions(threads=1)))
    model = CalibratedModel(calibration, token_bytes=0)
    priced = np.sum(list(prediction_ns(model, samples).values()), axis=0)
    longer = np.where(idled, 4_000_000 - samples.idled_ns, 0)
    slower = replace(samples, duration_ns=np.rint(1.1 * priced).astype(np.int64) + longer)
    assert idle_start_ns(model, slower) == pytest.approx(4_000_000, rel=1e-3)
    assert idle_start_ns(model, replace(samples, idled_ns=np.full(len(samples), NOT_IDLE))) == 0


def test_the_simulator_waits_before_the_first_step_after_idling_only(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    base = base_scenario("cpu", tmp_path).with_overrides(["policy.name=gpu-only"])
    made = calibrate(base, RunOptions(threads=1), scale=0.05).calibration
    alone, loop = poisson(5, 0.01, 64, 6, 5), closed_loop(5, (64, 64), (6, 6), seed=1)
    ttft = {}
    for idle_ns in (0, 7_000_000):
        write_calibration(replace(made, idle_start_ns=idle_ns), file)
        priced = base.with_overrides([f"cost.source=calibration:{file}"])
        users = priced.with_overrides(["workload.concurrency=1"])
        for name, scenario, trace in (("alone", priced, alone), ("loop", users, loop)):
            requests = simulate(scenario, trace).requests
            ttft[name, idle_ns] = requests["first_token_ns"] - requests["arrival_ns"]
    assert np.all((ttft["alone", 7_000_000] - ttft["alone", 0])[1:] == 7_000_000)
    assert np.all((ttft["loop", 7_000_000] - ttft["loop", 0])[1:] == 0)
