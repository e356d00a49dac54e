"""The validation: its rule, its intervals, its error budget, and the whole chain on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.cli.app import run as command
from hisparsim.results.records import RequestStatus, RunResult
from hisparsim_realrun.bootstrap import (
    STATISTICS,
    duration_interval,
    latencies_of,
    latency_interval,
    rerun_noise,
)
from hisparsim_realrun.budget import BudgetLine, ErrorBudget, num_equal_steps
from hisparsim_realrun.validation import (
    BOUNDS,
    MetricCheck,
    PolicyCheck,
    Validation,
    Verdict,
    check_policy,
)
from hisparsim_realrun.validation_workloads import LEAST_REQUESTS, POLICIES, base_scenario, workloads

MS = 1_000_000


def run_of(ttft_ms: np.ndarray[Any, Any], tokens: int = 11, tpot_ms: float = 10.0) -> RunResult:
    """A run of requests that arrive every 100 ms."""
    count = len(ttft_ms)
    arrival = np.arange(count, dtype=np.int64) * 100 * MS
    first = arrival + (ttft_ms * MS).astype(np.int64)
    finish = first + round((tokens - 1) * tpot_ms * MS)
    whole = np.full(count, tokens, np.int64)
    zeros = np.zeros(count, np.int64)
    requests = {
        "request_id": np.arange(count, dtype=np.int64),
        "session": zeros - 1,
        "turn": zeros,
        "arrival_ns": arrival,
        "admitted_ns": arrival,
        "first_token_ns": first,
        "finish_ns": finish,
        "prompt_tokens": whole * 5,
        "output_tokens": whole,
        "declared_output_tokens": whole,
        "hit_tokens": zeros,
        "num_preemptions": zeros,
        "status": np.full(count, int(RequestStatus.FINISHED), np.int8),
    }
    steps = {"start_ns": arrival, "duration_ns": zeros + 100 * MS, "running": zeros + 1}
    return RunResult("hybrid", {}, {"name": "made up", "sha256": "x"}, 1.0, {}, requests, steps)


BUDGET = ErrorBudget((BudgetLine("moe", 1.0, 1.1, 1.1, 0.1, 0.1),), 1.0, 1.1, 1.1, 10, 10, 10)


def check_of(
    simulated: RunResult, measured: RunResult, reruns: dict[str, float] | None = None
) -> PolicyCheck:
    return check_policy("steady", simulated, measured, BUDGET, reruns)


def waits(count: int = 200, seed: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).lognormal(4.0, 0.5, count)


# -- the rule ---------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    error=st.floats(-0.5, 0.5),
    noise=st.one_of(st.none(), st.floats(0, 0.4)),
    bound=st.sampled_from((0.05, 0.15)),
)
def test_a_cell_passes_within_its_bound_or_its_noise_and_is_quiet_only_below_the_bound(
    error: float, noise: float | None, bound: float
) -> None:
    cell = MetricCheck("ttft_s.p50", 1.0 + error, 1.0, error, noise, bound, True)
    assert cell.passed == (abs(error) <= bound or (noise is not None and abs(error) <= noise))
    assert cell.is_quiet == (noise is not None and noise < bound)


def verdict_of(cells: list[MetricCheck]) -> Verdict:
    run = run_of(waits(10))
    validation = Validation("cpu", {})
    validation.checks = [PolicyCheck("steady", "hybrid", run, run, tuple(cells), BUDGET)]
    return validation.verdict


def test_steps_are_compared_from_the_start_to_the_first_that_differs() -> None:
    run = run_of(waits(10))
    running = run.steps["running"].copy()
    running[7] = 5
    other = replace(run, steps={**run.steps, "running": running})
    assert num_equal_steps(run, run) == 10
    assert num_equal_steps(run, other) == num_equal_steps(other, run) == 7


def test_a_miss_fails_noise_excuses_it_and_too_much_noise_fails_as_untold() -> None:
    good = MetricCheck("ttft_s.p50", 1.0, 1.0, 0.0, 0.01, 0.05, True)
    miss = replace(good, rel_error=0.08)
    noisy_miss = replace(miss, noise_rel=0.10)
    assert verdict_of([good] * 10) is Verdict.PASSED
    assert verdict_of([good] * 9 + [miss]) is Verdict.FAILED
    assert verdict_of([good] * 9 + [noisy_miss]) is Verdict.PASSED
    assert verdict_of([good] * 8 + [noisy_miss] * 2) is Verdict.PASSED
    assert verdict_of([good] * 7 + [noisy_miss] * 3) is Verdict.TOO_NOISY
    assert verdict_of([good] * 9 + [replace(good, noise_rel=None)]) is Verdict.PASSED


def test_p99_counts_and_tpot_medians_are_reported_and_not_judged() -> None:
    check = check_of(run_of(waits()), run_of(waits()))
    judged = {metric.name for metric in check.metrics if metric.judged}
    assert judged == set(BOUNDS)
    assert {"ttft_s.p99", "tpot_s.p50", "num_preemptions"} <= {metric.name for metric in check.metrics}


def test_fewer_than_two_hundred_requests_are_not_judged() -> None:
    check = check_of(run_of(waits(199)), run_of(waits(199)))
    assert not any(metric.judged for metric in check.metrics)


def test_equal_runs_have_no_error_and_no_noise_from_requests() -> None:
    run = run_of(waits())
    for metric in check_of(run, run).metrics:
        assert metric.rel_error == 0.0
        assert metric.passed
        assert not metric.noise_rel


def test_a_simulation_that_is_a_tenth_too_slow_misses_the_median_and_meets_the_tail() -> None:
    measured = run_of(waits())
    simulated = run_of(waits() * 1.10)
    metrics = {metric.name: metric for metric in check_of(simulated, measured).metrics}
    assert metrics["ttft_s.p50"].rel_error == pytest.approx(0.10, abs=1e-3)
    assert not metrics["ttft_s.p50"].passed
    assert metrics["ttft_s.p95"].passed
    assert metrics["output_tokens_per_s"].passed


def test_noise_of_reruns_widens_the_interval_of_every_cell() -> None:
    metrics = check_of(run_of(waits() * 1.10), run_of(waits()), {"ttft_s.p50": 0.2}).metrics
    median = next(metric for metric in metrics if metric.name == "ttft_s.p50")
    assert median.noise_rel == 0.2
    assert median.passed
    assert not median.is_quiet


# -- intervals --------------------------------------------------------------------------------------


def test_the_paired_bootstrap_sees_the_error_and_not_the_variety_of_requests() -> None:
    measured = waits()
    noise = np.random.default_rng(9).lognormal(0.0, 0.02, len(measured))
    paired = latency_interval(measured * noise, measured, STATISTICS["p50"], seed=1)
    shuffled = np.random.default_rng(4).permutation(measured)
    unpaired = latency_interval(shuffled, measured, STATISTICS["p50"], seed=1)
    assert paired < 0.03
    assert unpaired > 2 * paired


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_an_interval_covers_the_true_error_nineteen_times_of_twenty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    measured = rng.lognormal(4.0, 0.3, 200)
    simulated = measured * rng.lognormal(np.log(1.03), 0.05, 200)
    half = latency_interval(simulated, measured, STATISTICS["mean"], seed=2)
    error = float(simulated.mean() / measured.mean() - 1)
    true_error = 1.03 * np.exp(0.05**2 / 2) - 1
    assert abs(error - true_error) < 2.5 * half


def test_intervals_of_nothing_are_nothing() -> None:
    nothing = np.full(5, np.nan)
    assert np.isnan(latency_interval(nothing, nothing, STATISTICS["p50"], seed=1))
    assert np.isnan(rerun_noise([1.0]))
    assert rerun_noise([2.0, 2.0, 2.0]) == 0.0
    assert rerun_noise([0.9, 1.0, 1.1]) == pytest.approx(1.96 * 0.1, rel=1e-3)
    assert rerun_noise([0.0, 0.0]) == 0.0


def test_throughput_is_resampled_by_the_waits_between_finished_requests() -> None:
    run = run_of(waits())
    assert duration_interval(run, run, seed=1) == 0.0
    assert duration_interval(run_of(waits(seed=5)), run, seed=1) > 0.0


def test_a_request_that_ends_late_and_gives_the_time_back_at_the_next_is_no_noise_of_throughput() -> None:
    measured = run_of(np.full(400, 50.0))
    late = np.full(400, 50.0)
    late[::2] += 40.0  # every other one ends 40 ms later: the sum of all waits is the same
    assert duration_interval(run_of(late), measured, seed=1) < 0.012
    rng = np.random.default_rng(1)
    slow = run_of(np.cumsum(rng.normal(0.0, 40.0, 400)) + 5000.0)  # nothing is given back
    assert duration_interval(slow, measured, seed=1) > 0.03


def test_requests_that_were_not_served_have_no_latency() -> None:
    run = run_of(waits(10))
    status = run.requests["status"].copy()
    status[3] = int(RequestStatus.REJECTED)
    cut = replace(run, requests={**run.requests, "status": status})
    assert np.isnan(latencies_of(cut)["ttft_s"][3])
    assert np.isfinite(latencies_of(cut)["ttft_s"][4])


# -- workloads and the whole chain ------------------------------------------------------------------


def test_every_workload_has_requests_enough_to_be_judged_that_fit_the_window(tmp_path: Path) -> None:
    base = base_scenario("cpu", tmp_path)
    names = []
    for workload in workloads("cpu"):
        rounds = [workload.make(3.0, number) for number in range(workload.num_rounds)]
        names.append(workload.name)
        assert sum(trace.num_requests for trace in rounds) >= LEAST_REQUESTS
        assert len({trace.sha256 for trace in rounds}) == workload.num_rounds > 1
        for trace in rounds:
            assert (trace.input_tokens + trace.output_tokens).max() <= base.scheduler.max_model_len
        base.with_overrides(workload.settings)
    assert names == ["steady", "pressure", "multi-turn"]
    assert len(POLICIES) == 4


@pytest.mark.slow
def test_validate_plays_both_worlds_and_tells_every_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["validate", "--requests", "8", "--calibration-scale", "0.05", "--reruns", "2", "--threads", "1"]
    code = command([*line, "--policy", "gpu-only", "--policy", "hybrid", "--out", str(out), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 1  # too few requests to judge anything
    assert document["verdict"] == Verdict.TOO_NOISY.value
    assert document["device"] == "cpu"
    assert [(entry["name"], entry["policy"]) for entry in document["workloads"]] == [
        (name, policy) for name in ("steady", "pressure", "multi-turn") for policy in ("gpu-only", "hybrid")
    ]
    for entry in document["workloads"]:
        assert entry["num_requests"] == 8
        named = {metric["name"]: metric for metric in entry["metrics"]}
        for name in ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "output_tokens_per_s"):
            assert named[name]["simulated"] > 0
            assert named[name]["measured"] > 0
            assert {"rel_error", "noise_rel", "passed"} <= set(named[name])
        assert named["num_preemptions"]["measured"] == named["num_preemptions"]["simulated"]
        assert {line["part"] for line in entry["budget"]["lines"]} >= {"projections", "loop"}
    assert document["reruns"]["of"] == "multi-turn, gpu-only"
    assert (out / "index.html").stat().st_size > 10_000
    assert (out / "validation_scatter.png").is_file()
    assert (out / "pressure-hybrid" / "measured" / "run.json").is_file()
    # A calibration that exists is used as it is.
    again = ["validate", "--requests", "8", "--policy", "hybrid", "--reruns", "1", "--threads", "1", "--json"]
    command([*again, "--calibration", str(out / "calibration.json")])
    assert json.loads(capsys.readouterr().out)["calibration"]["date"] == document["calibration"]["date"]
