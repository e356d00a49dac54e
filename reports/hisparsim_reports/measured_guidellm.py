"""GuideLLM's ``benchmarks.json``: one benchmark of it, under this project's metric names.

Its ``inter_token_latency_ms`` is (last - first token) / (n - 1), this project's TPOT; its
``time_per_output_token_ms`` divides by all tokens, the first included, and is matched to nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hisparsim.results.distribution import STATISTICS

from .errors import ReportError
from .measurement import Measurement, number

_LATENCIES = {
    "time_to_first_token_ms": ("ttft_s", 1e-3),
    "inter_token_latency_ms": ("tpot_s", 1e-3),
    "request_latency": ("e2e_s", 1.0),
}
_RATES = {
    "requests_per_second": "request_per_s",
    "output_tokens_per_second": "output_tokens_per_s",
    "tokens_per_second": "total_tokens_per_s",
}


def is_guidellm(document: Mapping[str, Any]) -> bool:
    """Query: whether a JSON document is GuideLLM's."""
    benchmarks = document.get("benchmarks")
    first = benchmarks[0] if isinstance(benchmarks, list) and benchmarks else None
    return isinstance(first, dict) and isinstance(first.get("metrics"), dict)


def read_guidellm(path: Path, document: Mapping[str, Any]) -> Measurement:
    """Query: the only benchmark of a GuideLLM file.

    Raises:
        ReportError: it holds several (a sweep): one must be cut out first.
    """
    benchmarks = document["benchmarks"]
    if len(benchmarks) != 1:
        raise ReportError(
            f"{path}: holds {len(benchmarks)} benchmarks (a sweep); keep one, for instance with "
            "jq '.benchmarks |= [.[0]]'"
        )
    entry = benchmarks[0]
    metrics: dict[str, float] = {}
    for theirs, (ours, scale) in _LATENCIES.items():
        summary = _successful(entry["metrics"], theirs)
        percentiles = _part(summary, "percentiles")
        for statistic in STATISTICS:
            found = percentiles if statistic in percentiles else summary
            key = "median" if statistic == "p50" and statistic not in percentiles else statistic
            if found.get(key) is not None:
                metrics[f"{ours}.{statistic}"] = number(found, key, path) * scale
    for theirs, ours in _RATES.items():
        summary = _successful(entry["metrics"], theirs)
        if summary.get("mean") is not None:
            metrics[ours] = number(summary, "mean", path)
    totals = _part(entry["metrics"], "request_totals") or _part(entry, "request_totals")
    if totals.get("successful") is not None:
        metrics["num_finished"] = number(totals, "successful", path)
    if entry.get("duration") is not None:
        metrics["duration_s"] = number(entry, "duration", path)
    definitions = (
        "TPOT is matched to GuideLLM's inter_token_latency_ms; its time_per_output_token_ms counts the first "
        "token's wait in and is left out.",
        "Successful requests only. Rates: GuideLLM's mean over time, here tokens over the whole duration.",
        "Latencies: seen by the client, so with HTTP and detokenisation; here from arrival at the engine.",
    )
    return Measurement(path.stem, "GuideLLM", metrics, definitions)


def _successful(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Query: the summary over successful requests, empty where the metric is missing."""
    return _part(_part(metrics, name), "successful")


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Query: a JSON object in another, empty where it is missing or something else."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}
