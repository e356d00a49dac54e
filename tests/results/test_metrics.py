import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import synthetic_run

from hisparsim.results import RequestStatus, ResultError, RunResult
from hisparsim.results.metrics import busy_time_ns, compute_metrics, run_row
from hisparsim.results.steady import SteadyVerdict

ROW_FIELDS = [
    "policy",
    "num_requests",
    "num_finished",
    "duration_s",
    "ttft_s",
    "tpot_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "mean_running",
    "num_preemptions",
    "h2d_bytes",
    "d2h_bytes",
    "hot_hit_rate",
    "resident_share",
    "offered_load",
    "bound_by",
    "wall_s",
]


def hand_made(arrival: list[int], first: list[int], finish: list[int], output: list[int]) -> RunResult:
    """Requests of 100 prompt tokens; two steps of 1 s with one and two requests running."""
    n = len(arrival)
    zeros = np.zeros(n, np.int64)
    second = 1_000_000_000
    return RunResult(
        policy="gpu-only",
        scenario={"workload": {"warmup_s": 0.0}, "slo": {}},
        trace={"num_requests": n},
        wall_s=0.0,
        summary={},
        requests={
            "request_id": np.arange(n),
            "session": zeros - 1,
            "turn": zeros,
            "arrival_ns": np.array(arrival) * second,
            "admitted_ns": np.array(arrival) * second,
            "first_token_ns": np.array(first) * second,
            "finish_ns": np.array(finish) * second,
            "prompt_tokens": zeros + 100,
            "output_tokens": np.array(output),
            "declared_output_tokens": np.array(output),
            "hit_tokens": zeros,
            "num_preemptions": zeros,
            "status": zeros.astype(np.int8),
        },
        steps={
            "start_ns": np.array([0, 1]) * second,
            "duration_ns": np.array([1, 1]) * second,
            "running": np.array([1, 2]),
        },
        itl=(np.array([second]), np.array([3])),
    )


def test_latencies_follow_the_benchmark_definitions_on_a_run_computed_by_hand() -> None:
    metrics = compute_metrics(hand_made([0, 1], [2, 2], [8, 2], [4, 1]))
    assert metrics.ttft_s.mean == 1.5
    assert metrics.tpot_s.mean == 2.0  # (8 - 2) / 3; the request of one token is left out
    assert metrics.tpot_s.count == 1
    assert metrics.e2e_s.p50 == 4.5
    assert metrics.itl_s.mean == 1.0
    assert metrics.duration_s == 8.0
    assert metrics.output_tokens_per_s == 5 / 8
    assert metrics.total_tokens_per_s == 205 / 8
    assert metrics.goodput_per_s is None


def test_running_requests_are_averaged_over_the_time_with_a_request_in_the_system() -> None:
    result = hand_made([0, 1, 10], [1, 2, 11], [2, 2, 12], [2, 1, 2])
    assert busy_time_ns(result) == 4_000_000_000
    assert compute_metrics(result).mean_running == 3 / 4
    assert compute_metrics(result).peak_running == 2


def test_the_warm_up_is_left_out_of_latencies_and_rates_but_not_of_the_counts() -> None:
    result = hand_made([0, 5], [1, 7], [2, 9], [2, 3])
    result = replace(result, scenario={"workload": {"warmup_s": 5.0}, "slo": {}})
    metrics = compute_metrics(result)
    assert (metrics.num_requests, metrics.num_finished, metrics.num_measured) == (2, 2, 1)
    assert metrics.ttft_s.mean == 2.0
    assert metrics.duration_s == 4.0
    assert metrics.output_tokens_per_s == 3 / 4


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    result = hand_made([0, 0], [1, 3], [5, 5], [5, 5])
    result = replace(result, scenario={"slo": {"ttft_s": 2.0, "tpot_s": 1.0, "e2e_s": None}})
    assert compute_metrics(result).goodput_per_s == 1 / 5


def test_an_unknown_objective_is_refused_by_name() -> None:
    result = replace(hand_made([0], [1], [2], [2]), scenario={"slo": {"ttft_ms": 5}})
    with pytest.raises(ResultError, match=r"slo\.ttft_ms.*known: ttft_s, tpot_s, e2e_s"):
        compute_metrics(result)


def test_hit_rate_and_resident_share_are_null_where_nothing_was_looked_up() -> None:
    row = run_row(hand_made([0], [1], [2], [2]))
    assert row["hot_hit_rate"] is None and row["resident_share"] is None
    result = replace(
        hand_made([0], [1], [2], [2]),
        summary={"hot_hit_rows": 9, "missed_rows": 1, "resident_rows": 30},
    )
    row = run_row(result)
    assert (row["hot_hit_rate"], row["resident_share"]) == (0.9, 0.75)


def test_a_run_in_which_nothing_finished_yields_nulls_and_plain_json() -> None:
    result = hand_made([0], [1], [2], [2])
    requests = {**result.requests, "status": np.array([int(RequestStatus.UNFINISHED)])}
    requests["finish_ns"] = np.array([-1])
    row = run_row(replace(result, requests=requests))
    assert row["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert row["output_tokens_per_s"] == 0.0
    json.dumps(row, allow_nan=False)


def test_the_row_has_exactly_the_fields_of_the_replay_json_in_order() -> None:
    assert list(run_row(synthetic_run(num_requests=20))) == ROW_FIELDS


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_busy_time_and_mean_running_equal_a_sweep_over_all_instants(seed: int) -> None:
    result = synthetic_run("gpu-only", num_requests=25, rate_per_s=0.5, seed=seed)
    arrival, finish = result.requests["arrival_ns"], result.requests["finish_ns"]
    instants = np.unique(np.concatenate((arrival, finish)))
    slow = 0
    for left, right in pairwise(instants):
        if ((arrival <= left) & (finish >= right)).any():
            slow += int(right - left)
    assert busy_time_ns(result) == slow
    total = int((result.steps["running"] * result.steps["duration_ns"]).sum())
    assert compute_metrics(result).mean_running == pytest.approx(total / slow)


def test_dotted_names_cover_every_statistic() -> None:
    flat = compute_metrics(synthetic_run(num_requests=20)).flat()
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            assert isinstance(flat[f"{metric}.{statistic}"], float)
    assert flat["steady_state"] in {verdict.value for verdict in SteadyVerdict}


def test_an_overloaded_server_is_called_growing_and_a_light_one_steady() -> None:
    overloaded = compute_metrics(synthetic_run("gpu-only", num_requests=300, rate_per_s=8.0))
    assert overloaded.steady_state.verdict is SteadyVerdict.GROWING
    light = compute_metrics(synthetic_run("hybrid", num_requests=300, rate_per_s=0.5))
    assert light.steady_state.verdict is SteadyVerdict.STEADY


def test_a_ragged_or_unknown_column_is_refused_by_name() -> None:
    result = synthetic_run(num_requests=5)
    with pytest.raises(ResultError, match="'turn' has shape"):
        replace(result, requests={**result.requests, "turn": np.zeros(2, np.int64)})
    with pytest.raises(ResultError, match="unknown column 'speed'"):
        replace(result, steps={**result.steps, "speed": result.steps["running"]})
    with pytest.raises(ResultError, match="every column holds integers"):
        replace(result, steps={**result.steps, "running": result.steps["running"] * 1.0})
