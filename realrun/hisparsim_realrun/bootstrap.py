"""Intervals of the difference between a simulated and a measured run, by resampling requests in pairs.

Both worlds served the same requests, so a resampled request is taken with both of its times: what only the
workload's variety spreads (long prompts, short prompts) cancels, what is left is the error's own uncertainty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hisparsim.results.metrics import SLO_METRICS
from hisparsim.results.records import SERVED, RunResult

Floats = NDArray[np.float64]
NUM_RESAMPLES = 1000
LEVEL = 0.95
_Z95 = 1.959964
"""Half width of a 95 % interval in standard deviations."""

STATISTICS: Mapping[str, Callable[[Floats], float]] = MappingProxyType(
    {
        "mean": lambda values: float(values.mean()),
        "p50": lambda values: float(np.percentile(values, 50)),
        "p90": lambda values: float(np.percentile(values, 90)),
        "p95": lambda values: float(np.percentile(values, 95)),
        "p99": lambda values: float(np.percentile(values, 99)),
    }
)


def latencies_of(result: RunResult) -> dict[str, Floats]:
    """Query: latency name -> [requests] seconds, NaN where a request has none (not served, one token)."""
    requests = result.requests
    served = result.has_status(*SERVED)
    arrival, first, last = (
        requests[name].astype(np.float64) for name in ("arrival_ns", "first_token_ns", "finish_ns")
    )
    output = requests["output_tokens"].astype(np.float64)
    several = served & (output > 1)
    samples = {
        "ttft_s": np.where(served, first - arrival, np.nan),
        "tpot_s": np.where(several, (last - first) / np.maximum(output - 1, 1), np.nan),
        "e2e_s": np.where(served, last - arrival, np.nan),
    }
    return {name: samples[name] / 1e9 for name in SLO_METRICS}


def latency_interval(
    simulated: Floats, measured: Floats, statistic: Callable[[Floats], float], seed: int
) -> float:
    """Query: half of the 95 % interval of (statistic of simulated) / (of measured) - 1.

    Args:
        simulated: [requests] seconds, NaN where there is none.
        measured: the same requests.

    NaN where no request was served in both.
    """
    both = ~(np.isnan(simulated) | np.isnan(measured))
    pairs = np.stack([simulated[both], measured[both]])
    return _half_interval(pairs, lambda drawn: statistic(drawn[0]) / statistic(drawn[1]) - 1.0, seed)


def duration_interval(simulated: RunResult, measured: RunResult, seed: int) -> float:
    """Query: half of the 95 % interval of the throughput's relative error.

    Throughput is tokens over time, and the time is the sum of the waits between one finished request and the
    next: these waits are resampled, the k-th of both runs together, in blocks of neighbours (a moving block
    bootstrap), since a request that ends late in one world gives back at the next what it took.
    """
    waits = [_waits_between_finishes(result) for result in (simulated, measured)]
    count = min(len(wait) for wait in waits)
    pairs = np.stack([wait[:count] for wait in waits])
    block = max(round(count**0.5), 1)
    return _half_interval(pairs, lambda drawn: float(drawn[1].sum() / drawn[0].sum()) - 1.0, seed, block)


def rerun_noise(values: Sequence[float]) -> float:
    """Query: half of the 95 % interval of one run about the mean of reruns, relative to that mean.

    0 where the mean is 0, NaN for fewer than two runs.
    """
    if len(values) < 2:
        return float("nan")
    mean = float(np.mean(values))
    return _Z95 * float(np.std(values, ddof=1)) / abs(mean) if mean else 0.0


def _waits_between_finishes(result: RunResult) -> Floats:
    served = result.has_status(*SERVED)
    finish = np.sort(result.requests["finish_ns"][served])
    start = result.requests["arrival_ns"][result.requests["arrival_ns"] >= 0].min(initial=0)
    return np.diff(finish, prepend=start).astype(np.float64)


def _half_interval(pairs: Floats, value: Callable[[Floats], float], seed: int, block: int = 1) -> float:
    """Query: half of the percentile interval over resamples of the second dimension, block by block."""
    count = pairs.shape[1]
    if count < 2:
        return float("nan")
    rng = np.random.default_rng([seed, count])
    along = np.arange(block)
    drawn = []
    for _ in range(NUM_RESAMPLES):
        starts = rng.integers(0, count, -(-count // block))
        chosen = ((starts[:, None] + along).ravel() % count)[:count]
        drawn.append(value(pairs[:, chosen]))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(drawn, (tail, 100 - tail))
    return float(high - low) / 2
