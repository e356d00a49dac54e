"""Metrics of a run, as the field's benchmarks define them.

TTFT, TPOT, ITL, end-to-end latency, throughputs and goodput follow vLLM's serving benchmark
(``vllm bench serve``): TTFT from arrival to first token; TPOT = (last token - first token) / (n - 1) of
each request, those of one token left out; ITL over all gaps between tokens; throughput = tokens of completed
requests over the time from the first arrival to the last token. AIPerf's ``inter_token_latency`` is this
TPOT, its ``inter_chunk_latency`` this ITL.

Requests that arrive before ``workload.warmup_s`` are left out of latencies, throughputs, goodput and averages
over time; counts, bytes, peaks and ITL (gaps are kept without their request) are of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .distribution import Distribution
from .errors import ResultError
from .records import SERVED, RequestStatus, RunResult
from .steady import SteadyState, judge_steady_state

NS_PER_S = 1_000_000_000
ROW_STATISTICS = ("mean", "p50", "p90", "p99")

SLO_METRICS = ("ttft_s", "tpot_s", "e2e_s")
"""Latencies that a service level objective can bound, each the most that a good request may take."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """What one run achieved. Dotted names, as in ``ttft_s.p50``, come from :meth:`flat`."""

    num_requests: int
    num_finished: int
    """Finished or stopped early."""
    num_measured: int
    """Of those, arrived after the warm-up: the sample of the latencies."""
    duration_s: float
    """From the first arrival (the end of the warm-up, if there is one) to the last token."""
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    request_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    """Requests a second that met every objective of ``slo``; None where none is set."""
    mean_running: float
    """Running requests averaged over the time with any request in the system."""
    peak_running: int
    num_preemptions: int
    h2d_bytes: int
    """Host to device, one GPU."""
    d2h_bytes: int
    hot_hit_rate: float | None
    """Hot-buffer hits / (hits + misses), over rows not resident; None where nothing was looked up."""
    resident_share: float | None
    """Selected rows read from resident pages / all selected rows; None where none were selected."""
    offered_load: float | None
    bound_by: str | None
    steady_state: SteadyState

    def flat(self) -> dict[str, float | int | str | None]:
        """Query: every metric under its dotted name."""
        values: dict[str, float | int | str | None] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Distribution):
                values |= {f"{name}.{key}": number for key, number in value.as_dict().items()}
            elif isinstance(value, SteadyState):
                values["steady_state"] = value.verdict.value
            else:
                values[name] = value
        return values


def compute_metrics(result: RunResult) -> Metrics:
    """Query: the metrics of a run.

    Raises:
        ResultError: ``slo`` names a latency that is not one of ``SLO_METRICS``.
    """
    requests, summary = result.requests, result.summary
    warmup_ns = warmup_ns_of(result)
    served = result.has_status(*SERVED)
    measured = served & (requests["arrival_ns"] >= warmup_ns)
    arrival, first, last = (requests[k][measured] for k in ("arrival_ns", "first_token_ns", "finish_ns"))
    output = requests["output_tokens"][measured]
    duration_s = _duration_ns(result, warmup_ns, measured) / NS_PER_S
    ttft_ns, e2e_ns = first - arrival, last - arrival
    several = output > 1
    tpot_ns = (last - first)[several] / (output[several] - 1)

    def per_second(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    good = _num_good(ttft_ns, e2e_ns, last - first, output, slo_of(result))
    hits, misses = float(summary.get("hot_hit_rows", 0)), float(summary.get("missed_rows", 0))
    resident = float(summary.get("resident_rows", 0))
    return Metrics(
        num_requests=result.num_requests,
        num_finished=int(served.sum()),
        num_measured=int(measured.sum()),
        duration_s=duration_s,
        ttft_s=Distribution.of(ttft_ns, 1 / NS_PER_S),
        tpot_s=Distribution.of(tpot_ns, 1 / NS_PER_S),
        itl_s=Distribution.of_weighted(*result.itl, scale=1 / NS_PER_S),
        e2e_s=Distribution.of(e2e_ns, 1 / NS_PER_S),
        request_per_s=per_second(int(measured.sum())),
        output_tokens_per_s=per_second(int(output.sum())),
        total_tokens_per_s=per_second(int(output.sum() + requests["prompt_tokens"][measured].sum())),
        goodput_per_s=None if good is None else per_second(good),
        mean_running=_mean_running(result, warmup_ns),
        peak_running=int(result.steps["running"].max(initial=0)) if "running" in result.steps else 0,
        num_preemptions=int(summary.get("num_preemptions", requests["num_preemptions"].sum())),
        h2d_bytes=_bytes(result, "h2d_bytes"),
        d2h_bytes=_bytes(result, "d2h_bytes"),
        hot_hit_rate=hits / (hits + misses) if hits + misses else None,
        resident_share=resident / (resident + hits + misses) if resident + hits + misses else None,
        offered_load=summary.get("offered_load"),
        bound_by=summary.get("bound_by"),
        steady_state=judge_steady_state(result, warmup_ns),
    )


def run_row(result: RunResult, metrics: Metrics | None = None) -> dict[str, Any]:
    """Query: the run as one entry of ``runs`` in the JSON of ``hisparsim replay --json``."""
    m = compute_metrics(result) if metrics is None else metrics
    return {
        "policy": result.policy,
        "num_requests": m.num_requests,
        "num_finished": m.num_finished,
        "duration_s": m.duration_s,
        "ttft_s": m.ttft_s.as_dict(ROW_STATISTICS),
        "tpot_s": m.tpot_s.as_dict(ROW_STATISTICS),
        "output_tokens_per_s": m.output_tokens_per_s,
        "total_tokens_per_s": m.total_tokens_per_s,
        "mean_running": m.mean_running,
        "num_preemptions": m.num_preemptions,
        "h2d_bytes": m.h2d_bytes,
        "d2h_bytes": m.d2h_bytes,
        "hot_hit_rate": m.hot_hit_rate,
        "resident_share": m.resident_share,
        "offered_load": m.offered_load,
        "bound_by": m.bound_by,
        "wall_s": result.wall_s,
    }


def warmup_ns_of(result: RunResult) -> int:
    """Query: nanoseconds from the start that the scenario leaves out (``workload.warmup_s``)."""
    return round(float(scenario_value(result.scenario, "workload.warmup_s") or 0.0) * NS_PER_S)


def slo_of(result: RunResult) -> dict[str, float]:
    """Query: the objectives set in ``slo.*``, latency name -> seconds."""
    section = result.scenario.get("slo") or {}
    return {name: float(limit) for name, limit in section.items() if limit is not None}


def scenario_value(scenario: Mapping[str, Any], key: str) -> Any:
    """Query: the value of ``section.key`` in a resolved scenario, None where it is absent."""
    value: Any = scenario
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _num_good(
    ttft_ns: NDArray[np.int64],
    e2e_ns: NDArray[np.int64],
    decode_ns: NDArray[np.int64],
    output: NDArray[np.int64],
    slo: Mapping[str, float],
) -> int | None:
    """Query: requests that meet every objective; a request of one token has a TPOT of 0, as in vLLM."""
    unknown = [name for name in slo if name not in SLO_METRICS]
    if unknown:
        raise ResultError(f"slo.{unknown[0]}: not a latency of a request; known: {', '.join(SLO_METRICS)}")
    if not slo:
        return None
    tpot_ns = decode_ns / np.maximum(output - 1, 1)
    latencies = {"ttft_s": ttft_ns, "tpot_s": tpot_ns, "e2e_s": e2e_ns}
    good = np.ones(len(output), bool)
    for name, limit_s in slo.items():
        good &= latencies[name] <= limit_s * NS_PER_S
    return int(good.sum())


def _duration_ns(result: RunResult, warmup_ns: int, measured: NDArray[np.bool_]) -> int:
    """Query: from the first arrival, or the end of the warm-up, to the last token of a measured request."""
    if not measured.any():
        return 0
    arrival = result.requests["arrival_ns"]
    start = warmup_ns or int(arrival[arrival >= 0].min())
    return int(result.requests["finish_ns"][measured].max()) - start


def _mean_running(result: RunResult, warmup_ns: int) -> float:
    """Query: running requests x time over the time with a request in the system, both after the warm-up."""
    steps = result.steps
    if "running" not in steps:
        return 0.0
    start = np.maximum(steps["start_ns"], warmup_ns)
    span = np.maximum(steps["start_ns"] + steps["duration_ns"] - start, 0)
    busy_ns = busy_time_ns(result, warmup_ns)
    return float(np.dot(steps["running"].astype(np.float64), span) / busy_ns) if busy_ns else 0.0


def busy_time_ns(result: RunResult, from_ns: int = 0) -> int:
    """Query: time from ``from_ns`` on during which at least one request had arrived and not yet left."""
    arrival, end = in_system(result)
    start = np.maximum(arrival, from_ns)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(start) else end
    if not len(start):
        return 0
    gap = np.maximum(start[1:] - np.maximum(end[:-1], from_ns), 0)
    return int(max(end[-1] - start[0], 0) - gap.sum())


def in_system(result: RunResult) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query: ([k] arrival, [k] leaving) in ns of the requests that arrived and were not refused.

    A request that never left is there until the end of the run.
    """
    submitted = result.requests["arrival_ns"] >= 0
    submitted &= ~result.has_status(RequestStatus.REJECTED, RequestStatus.SKIPPED)
    arrival, finish = (result.requests[name][submitted] for name in ("arrival_ns", "finish_ns"))
    steps = result.steps
    end_ns = max(
        int(finish.max(initial=0)),
        int(arrival.max(initial=0)),
        int((steps["start_ns"] + steps["duration_ns"]).max(initial=0)),
    )
    return arrival, np.where(finish < 0, end_ns, finish)


def _bytes(result: RunResult, name: str) -> int:
    """Query: bytes of the whole run, from the counters or else summed over the steps."""
    if name in result.summary:
        return int(result.summary[name])
    return int(result.steps[name].sum()) if name in result.steps else 0
