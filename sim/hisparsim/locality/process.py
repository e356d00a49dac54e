"""A seeded process of top-k selections with two time scales: which rows a decode step reads.

    score_i(t) = sqrt(1 - F) x_i(t) + sqrt(F) y_i(t)

x and y are stationary Gaussian AR(1) sequences, independent for each position i, x slow and y fast. A step
selects the newest token and the k - 1 largest scores of all positions. With three parameters this meets five
of six published figures of the HiSparse paper's GLM-5.1 trace within 2 % (docs/locality.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class ProcessError(ValueError):
    """Parameters that make no selection process."""


@dataclass(frozen=True)
class ScoreProcess:
    """Parameters of one layer's selections."""

    fast_share: float
    """F: variance of the score that the fast part carries; sets how many rows change a step."""
    slow_correlation: float
    """Of x from step to step; 1 / (1 - it) is its time scale in steps."""
    fast_correlation: float
    """Of y from step to step."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.fast_share <= 1.0:
            raise ProcessError(f"fast_share is {self.fast_share}: a share lies within 0..1")
        for name in ("slow_correlation", "fast_correlation"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ProcessError(f"{name} is {value}: a correlation lies within 0..1, 1 excluded")

    def selections(
        self, context_tokens: int, top_k: int, num_steps: int, seed: int, *, growing: bool = True
    ) -> Iterator[NDArray[np.int64]]:
        """Query: for each step, the [top_k] positions selected, the newest token last.

        Step t (from 0) sees `context_tokens + t + 1` positions, without `growing` always one more:
        a small top_k stands for a large one only while the context stays. The same arguments give the same
        selections. Raises ProcessError where the context is shorter than top_k.
        """
        if context_tokens < top_k or top_k < 2 or num_steps < 0:
            raise ProcessError(
                f"{num_steps} selections of {top_k} of {context_tokens} tokens: a selection takes at least 2 "
                "rows and at most the context"
            )
        rng = np.random.default_rng(seed)
        size = context_tokens + (num_steps if growing else 0)
        slow = rng.standard_normal(size, dtype=np.float32)
        fast = rng.standard_normal(size, dtype=np.float32)
        slow_noise = np.float32(np.sqrt(1.0 - self.slow_correlation**2))
        fast_noise = np.float32(np.sqrt(1.0 - self.fast_correlation**2))
        slow_weight = np.float32(np.sqrt(1.0 - self.fast_share))
        fast_weight = np.float32(np.sqrt(self.fast_share))
        for step in range(num_steps):
            seen = context_tokens + (step if growing else 0)
            score = slow_weight * slow[:seen] + fast_weight * fast[:seen]
            chosen = np.empty(top_k, dtype=np.int64)
            chosen[:-1] = np.argpartition(score, seen - top_k + 1)[seen - top_k + 1 :]
            chosen[-1] = seen
            yield chosen
            slow *= np.float32(self.slow_correlation)
            slow += slow_noise * rng.standard_normal(size, dtype=np.float32)
            fast *= np.float32(self.fast_correlation)
            fast += fast_noise * rng.standard_normal(size, dtype=np.float32)


def uniform_selections(
    context_tokens: int, top_k: int, num_steps: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Query: selections of an incoherent layer: the newest token and k - 1 others at random each step."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        seen = context_tokens + step
        chosen = rng.choice(seen, size=top_k - 1, replace=False)
        yield np.append(chosen, seen).astype(np.int64)
