"""Mean and percentiles of a sample, plain or weighted.

Percentiles are by linear interpolation between the two nearest order statistics, numpy's default and the
one behind vLLM's benchmark: p50 of two values is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Sample: TypeAlias = NDArray[np.float64] | NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
"""Names under which each distribution appears, as in ``ttft_s.p50``."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, in the unit of the sample; every field but ``count`` is None when it is empty."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, sample: Sample, scale: float = 1.0) -> Distribution:
        """Query: the distribution of ``sample`` [n], each value multiplied by ``scale``."""
        if not len(sample):
            return cls(0, None, None, None, None, None)
        values = np.asarray(sample, np.float64) * scale
        quantiles = np.percentile(values, PERCENTILES)
        return cls(len(values), float(values.mean()), *(float(q) for q in quantiles))

    @classmethod
    def of_weighted(cls, values: Sample, weights: NDArray[np.int64], scale: float = 1.0) -> Distribution:
        """Query: the distribution of ``np.repeat(values, weights)``, without making that array."""
        kept = np.asarray(weights) > 0
        kept_values, weights = np.asarray(values, np.float64)[kept], np.asarray(weights)[kept]
        if not len(kept_values):
            return cls(0, None, None, None, None, None)
        order = np.argsort(kept_values, kind="stable")
        ordered, weights = kept_values[order] * scale, weights[order]
        ends = np.cumsum(weights)
        total = int(ends[-1])
        position = np.asarray(PERCENTILES, np.float64) / 100 * (total - 1)
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, total - 1)
        below = ordered[np.searchsorted(ends, low, side="right")]
        above = ordered[np.searchsorted(ends, high, side="right")]
        quantiles = below + (above - below) * (position - low)
        mean = float(np.dot(ordered, weights) / total)
        return cls(total, mean, *(float(q) for q in quantiles))

    def as_dict(self, statistics: tuple[str, ...] = STATISTICS) -> dict[str, float | None]:
        """Query: the named statistics."""
        return {name: getattr(self, name) for name in statistics}
