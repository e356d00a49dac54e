"""How many distinct experts a batch of tokens touches, in expectation.

Each token picks `num_experts_per_token` of `num_experts`. Popularity falls from expert to expert by a
constant ratio over a range of `popularity_range` (a power law of loads with exponent 1, truncated). With the
range of the figures file this meets the published MoE layer times with a floor of about 40 us.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pick_probabilities(num_experts: int, per_token: int, popularity_range: float) -> NDArray[np.float64]:
    """Query: [num_experts] probability that one token picks each expert; they sum to `per_token`.

    An expert of popularity w is picked with 1 - exp(-c w), c solved by bisection.
    """
    if num_experts <= per_token:
        return np.ones(num_experts)
    ranks = np.arange(num_experts) / (num_experts - 1)
    popularity = popularity_range**ranks
    low, high = 0.0, 64.0
    for _ in range(200):
        middle = (low + high) / 2
        if float(np.sum(-np.expm1(-middle * popularity))) < per_token:
            low = middle
        else:
            high = middle
    return np.asarray(-np.expm1(-low * popularity))


def distinct_experts(tokens: NDArray[np.float64], picks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Query: [n] expected distinct experts for each token count, tokens drawn independently."""
    with np.errstate(divide="ignore"):
        log_missed = np.log1p(-picks)
    with np.errstate(invalid="ignore"):
        missed = np.exp(np.multiply.outer(tokens, log_missed))
    missed[tokens == 0] = 1.0
    return np.asarray(np.sum(1.0 - missed, axis=1))
