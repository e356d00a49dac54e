import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import synthetic_run

from hisparsim.results.metrics import compute_metrics
from hisparsim_reports.comparison import compare_runs, compare_with_measurement
from hisparsim_reports.errors import ReportError
from hisparsim_reports.measured import read_measurement


def vllm_result(num_requests: int = 50) -> dict[str, Any]:
    """A detailed result as `vllm bench serve` writes it, of requests of our own making; one failed."""
    rng = np.random.default_rng(1)
    output = [int(n) for n in rng.integers(1, 30, num_requests)]
    ttfts = [float(t) for t in rng.uniform(0.1, 2.0, num_requests)]
    itls = [[float(g) for g in rng.uniform(0.01, 0.05, n - 1)] for n in output]
    tpots = [sum(gaps) / (n - 1) for gaps, n in zip(itls, output, strict=True) if n > 1]
    result = {
        "model_id": "zai-org/GLM-5.3",
        "duration": 40.0,
        "completed": num_requests,
        "total_input_tokens": 1000,
        "total_output_tokens": sum(output),
        "request_throughput": num_requests / 40.0,
        "request_goodput": None,
        "output_throughput": sum(output) / 40.0,
        "total_token_throughput": (sum(output) + 1000) / 40.0,
        "mean_ttft_ms": 1e3 * float(np.mean(ttfts)),
        "median_ttft_ms": 1e3 * float(np.median(ttfts)),
        "p99_ttft_ms": 1e3 * float(np.percentile(ttfts, 99)),
        "mean_tpot_ms": 1e3 * float(np.mean(tpots)),
        "median_tpot_ms": 1e3 * float(np.median(tpots)),
        "input_lens": [20] * num_requests + [20],
        "output_lens": [*output, 0],
        "ttfts": [*ttfts, 0.0],
        "itls": [*itls, []],
        "errors": [""] * num_requests + ["timeout"],
    }
    return result


def write(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def test_a_vllm_result_keeps_its_aggregates_and_gains_the_missing_percentiles(tmp_path: Path) -> None:
    document = vllm_result()
    measured = read_measurement(write(tmp_path, document))
    assert measured.source == "vLLM bench serve"
    assert measured.metrics["ttft_s.p50"] == pytest.approx(document["median_ttft_ms"] / 1e3)
    served = np.array(document["ttfts"][:-1])
    assert measured.metrics["ttft_s.p95"] == pytest.approx(np.percentile(served, 95))
    latency = served + np.array([sum(gaps) for gaps in document["itls"][:-1]])
    assert measured.metrics["e2e_s.mean"] == pytest.approx(latency.mean())
    assert measured.metrics["output_tokens_per_s"] == document["output_throughput"]
    assert any("ttft_s.p95" in sentence for sentence in measured.definitions)


def test_aggregates_recomputed_from_single_requests_equal_those_written(tmp_path: Path) -> None:
    document = vllm_result()
    written = read_measurement(write(tmp_path, document)).metrics
    bare = {name: value for name, value in document.items() if not name.endswith("_ms")}
    computed = read_measurement(write(tmp_path, bare)).metrics
    for name in ("ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p50"):
        assert computed[name] == pytest.approx(written[name]), name


def test_an_aiperf_result_is_read_with_its_own_definitions(tmp_path: Path) -> None:
    document = {
        "request_latency": {"unit": "ms", "avg": 900.0, "p50": 850.0, "p99": 1500.0},
        "time_to_first_token": {"unit": "ms", "avg": 200.0, "p90": 300.0},
        "inter_token_latency": {"unit": "ms", "avg": 25.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 1234.0},
        "request_count": {"unit": "requests", "avg": 64.0},
    }
    measured = read_measurement(write(tmp_path, document))
    assert measured.source == "AIPerf"
    assert measured.metrics["tpot_s.mean"] == 0.025
    assert measured.metrics["e2e_s.p99"] == 1.5
    assert "itl_s.mean" not in measured.metrics


def test_the_last_line_of_an_sglang_file_is_read(tmp_path: Path) -> None:
    line = {"duration": 10.0, "completed": 3, "output_throughput": 5.0, "total_throughput": 9.0}
    line |= {"mean_ttft_ms": 120.0, "median_e2e_latency_ms": 800.0}
    first = json.dumps(line | {"output_throughput": 1.0})
    measured = read_measurement(write(tmp_path, f"{first}\n{json.dumps(line)}\n"))
    assert measured.source == "SGLang bench_serving"
    assert measured.metrics["output_tokens_per_s"] == 5.0
    assert measured.metrics["e2e_s.p50"] == 0.8


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "neither JSON nor JSON lines"),
        ("[1, 2]", "a benchmark result is a JSON object"),
        ({"speed": 3}, "not a benchmark result"),
        ({"duration": 1.0, "output_throughput": "fast"}, "output_throughput = 'fast'; a finite number"),
        ({**vllm_result(3), "itls": []}, "one a request is needed"),
        ({**vllm_result(3), "ttfts": ["a", 1, 2, 3]}, "must hold numbers"),
        ({"request_latency": {"unit": "fortnight", "avg": 1}}, "known units: ms"),
    ],
)
def test_a_bad_measurement_is_refused_with_one_line(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ReportError, match=message) as caught:
        read_measurement(write(tmp_path, document))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"gone\.json: no such file"):
        read_measurement(tmp_path / "gone.json")


def test_two_runs_are_compared_over_every_shared_number() -> None:
    first, second = synthetic_run("gpu-only", num_requests=30), synthetic_run("hybrid", num_requests=30)
    comparison = compare_runs(first, second)
    assert comparison.metrics[0] == "ttft_s.mean"
    expected = compute_metrics(second).ttft_s.mean / compute_metrics(first).ttft_s.mean - 1  # type: ignore[operator]
    assert comparison.difference("ttft_s.mean") == pytest.approx(expected)
    assert comparison.notes == ()
    assert len(comparison.table().rows) == len(comparison.metrics)
    json.dumps(comparison.as_json(), allow_nan=False)


def test_a_measurement_of_another_size_is_noted(tmp_path: Path) -> None:
    measured = read_measurement(write(tmp_path, vllm_result()))
    comparison = compare_with_measurement(synthetic_run(num_requests=30), measured)
    assert any("finished 30 requests, the measurement 50" in note for note in comparison.notes)
    assert {"ttft_s.p95", "tpot_s.mean", "total_tokens_per_s"} <= set(comparison.metrics)
