"""What is measured of samples: quantiles, ranks and distances."""

from __future__ import annotations

import numpy as np

from ..trace import Floats, Ints
from .description import Knots

_PROBABILITIES = (
    *(0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    *(0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0),
)


def knots(values: Ints | Floats, weights: Floats | None = None) -> Knots:
    """Quantiles at fixed probabilities; enough for a shape, too few to tell a row."""
    if weights is None:
        quantiles = np.quantile(values, _PROBABILITIES)
    else:
        order = np.argsort(values, kind="stable")
        share = np.cumsum(weights[order])
        quantiles = np.interp(_PROBABILITIES, (share - weights[order] / 2) / share[-1], values[order])
    return [
        (p, round(float(v), 6)) for p, v in zip(_PROBABILITIES, np.maximum.accumulate(quantiles), strict=True)
    ]


def ranks(values: Ints) -> Floats:
    """Mean ranks, ties sharing theirs. [n] -> [n]"""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return np.asarray((below + (counts - 1) / 2)[inverse], np.float64)


def rank_correlation(a: Ints, b: Ints) -> float:
    """Spearman's, 0 where one side is constant."""
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def copula_correlation(a: Ints, b: Ints) -> float:
    """The Gaussian copula's correlation that gives the rank correlation seen."""
    return float(np.clip(2 * np.sin(np.pi / 6 * rank_correlation(a, b)), -0.99, 0.99))


def ks_distance(a: Ints | Floats, b: Ints | Floats) -> float:
    """Kolmogorov-Smirnov distance of two samples."""
    both = np.concatenate([a, b])
    below_a = np.searchsorted(np.sort(a), both, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), both, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())
