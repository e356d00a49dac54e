"""Measurements of real servers, read from what their benchmarks write, under this project's metric names.

Known are the JSON of ``vllm bench serve`` (``--save-result``, best with ``--save-detailed``), the JSON lines
of SGLang's ``bench_serving`` (the last one), AIPerf's ``profile_export_aiperf.json``, GuideLLM's
``benchmarks.json`` and InferenceX-style CSV. Each reading says which definitions were matched, so that nobody
compares two things of one name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results.distribution import STATISTICS, Distribution

from .errors import ReportError
from .measured_guidellm import is_guidellm, read_guidellm
from .measured_inferencex import read_inferencex
from .measurement import Measurement, number

__all__ = ["Measurement", "read_measurement"]


def read_measurement(path: Path, concurrency: int | None = None) -> Measurement:
    """Query: the measurement in a benchmark's result file.

    Args:
        concurrency: which row of a table (CSV) of several points.

    Raises:
        ReportError: no such file, not JSON, or the result of no known benchmark.
    """
    if path.suffix.lower() == ".csv":
        return read_inferencex(path, concurrency)
    document = _read_json(path)
    for recognises, read in _READERS:
        if recognises(document):
            return read(path, document)
    raise ReportError(
        f"{path}: not a benchmark result this command knows; known: vllm bench serve (--save-result), "
        "sglang.bench_serving (--output-file), AIPerf (profile_export_aiperf.json), GuideLLM "
        "(benchmarks.json), InferenceX-style CSV"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read as text ({error})") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            document = json.loads(lines[-1]) if len(lines) > 1 else None
        except json.JSONDecodeError:
            document = None
        if document is None:
            raise ReportError(f"{path}: neither JSON nor JSON lines ({whole})") from None
    if not isinstance(document, dict):
        raise ReportError(f"{path}: holds a {type(document).__name__}; a benchmark result is a JSON object")
    return document


# --- vLLM and SGLang: one family of keys ---------------------------------------------------------------


_AGGREGATES = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s", "e2e_latency": "e2e_s"}
_RATES = {
    "duration": "duration_s",
    "completed": "num_finished",
    "request_throughput": "request_per_s",
    "request_goodput": "goodput_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "total_throughput": "total_tokens_per_s",
}


def _is_serving_benchmark(document: Mapping[str, Any]) -> bool:
    return "output_throughput" in document and "duration" in document


def _read_serving_benchmark(path: Path, document: Mapping[str, Any]) -> Measurement:
    """Query: aggregates as written; percentiles that are missing from the detailed lists, where saved."""
    metrics = {
        ours: number(document, theirs, path) for theirs, ours in _RATES.items() if document.get(theirs)
    }
    for theirs, ours in _AGGREGATES.items():
        for statistic in STATISTICS:
            key = "median" if statistic == "p50" else statistic
            if document.get(f"{key}_{theirs}_ms") is not None:
                metrics[f"{ours}.{statistic}"] = number(document, f"{key}_{theirs}_ms", path) / 1e3
    sglang = "total_throughput" in document
    definitions = [
        "Throughputs: tokens of completed requests over the benchmark's duration, as here.",
        "TPOT: (latency - TTFT) / (output tokens - 1), requests of one token left out, as here.",
        "TTFT and latency: seen by the client, so with HTTP, tokenisation and detokenisation; here from "
        "arrival at the engine.",
        "Percentiles: linear interpolation, as here.",
    ]
    if all(isinstance(document.get(name), list) for name in ("ttfts", "itls", "output_lens")):
        added = {name: value for name, value in _from_lists(path, document).items() if name not in metrics}
        metrics |= added
        if added:
            definitions.append(
                f"Computed from the lists of single requests: {', '.join(sorted(added))}; the latency of a "
                "request is its TTFT plus its inter-token gaps, failed requests are left out."
            )
    return Measurement(
        name=str(document.get("model_id") or document.get("label") or path.stem),
        source="SGLang bench_serving" if sglang else "vLLM bench serve",
        metrics=metrics,
        definitions=tuple(definitions),
    )


def _from_lists(path: Path, document: Mapping[str, Any]) -> dict[str, float]:
    ttfts, itls, outputs = document["ttfts"], document["itls"], document["output_lens"]
    if not len(ttfts) == len(itls) == len(outputs):
        raise ReportError(
            f"{path}: ttfts, itls and output_lens have {len(ttfts)}, {len(itls)} and {len(outputs)} entries; "
            "one a request is needed"
        )
    try:
        output: NDArray[np.float64] = np.array(outputs, np.float64)
        ttft: NDArray[np.float64] = np.array(ttfts, np.float64)
        decode = np.array([math.fsum(gaps) for gaps in itls], np.float64)
        served = output > 0
        gaps = np.array(
            [gap for gaps, ok in zip(itls, served, strict=True) if ok for gap in gaps], np.float64
        )
    except (TypeError, ValueError) as error:
        raise ReportError(f"{path}: ttfts, itls and output_lens must hold numbers ({error})") from None
    for name, values in (("output_lens", output), ("ttfts", ttft), ("itls", decode)):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if wrong.size:
            raise ReportError(f"{path}: {name}, request {wrong[0]}: a finite number, not below 0, is needed")
    several = output > 1
    samples = {
        "ttft_s": ttft[served],
        "tpot_s": decode[several] / (output[several] - 1),
        "itl_s": gaps,
        "e2e_s": (ttft + decode)[served],
    }
    return {
        f"{name}.{statistic}": value
        for name, sample in samples.items()
        for statistic, value in Distribution.of(sample).as_dict().items()
        if value is not None
    }


# --- AIPerf ---------------------------------------------------------------------------------------------


_AIPERF_LATENCIES = {
    "time_to_first_token": "ttft_s",
    "inter_token_latency": "tpot_s",
    "inter_chunk_latency": "itl_s",
    "request_latency": "e2e_s",
}
_AIPERF_SCALARS = {
    "benchmark_duration": "duration_s",
    "request_count": "num_finished",
    "request_throughput": "request_per_s",
    "goodput": "goodput_per_s",
    "output_token_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
}
_SECONDS_A_UNIT = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def _is_aiperf(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("request_latency"), dict)


def _read_aiperf(path: Path, document: Mapping[str, Any]) -> Measurement:
    metrics: dict[str, float] = {}
    for theirs, ours in _AIPERF_LATENCIES.items():
        entry = document.get(theirs)
        if isinstance(entry, dict):
            unit = str(entry.get("unit", "ms"))
            if unit not in _SECONDS_A_UNIT:
                known = ", ".join(_SECONDS_A_UNIT)
                raise ReportError(f"{path}: {theirs} is in {unit!r}; known units: {known}")
            for statistic in STATISTICS:
                key = "avg" if statistic == "mean" else statistic
                if entry.get(key) is not None:
                    metrics[f"{ours}.{statistic}"] = number(entry, key, path) * _SECONDS_A_UNIT[unit]
    for theirs, ours in _AIPERF_SCALARS.items():
        entry = document.get(theirs)
        if isinstance(entry, dict) and entry.get("avg") is not None:
            metrics[ours] = number(entry, "avg", path)
    definitions = (
        "TPOT is matched to AIPerf's inter_token_latency, ITL to its inter_chunk_latency.",
        "Latencies: seen by the client, so with HTTP and detokenisation; here from arrival at the engine.",
        "Throughputs: over AIPerf's benchmark duration, its warm-up left out.",
    )
    return Measurement(path.stem, "AIPerf", metrics, definitions)


_READERS: tuple[
    tuple[Callable[[Mapping[str, Any]], bool], Callable[[Path, Mapping[str, Any]], Measurement]], ...
] = (
    (_is_serving_benchmark, _read_serving_benchmark),
    (_is_aiperf, _read_aiperf),
    (is_guidellm, read_guidellm),
)
