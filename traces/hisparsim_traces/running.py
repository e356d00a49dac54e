"""Running figures over chunks: lengths by value, arrivals in order, sessions seen."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .statistics import WINDOWS_S
from .trace import Ints

DENSE = 1 << 20  # lengths below are counted in an array, longer ones in a dictionary


@dataclass
class Lengths:
    """How often each length occurs."""

    dense: Ints = field(default_factory=lambda: np.zeros(DENSE, np.int64))
    long: Counter[int] = field(default_factory=Counter)
    total: int = 0
    sum: int = 0

    def add(self, values: Ints) -> None:
        self.total += len(values)
        self.sum += int(values.sum())
        short = values[values < DENSE]
        counts = np.bincount(short)
        self.dense[: len(counts)] += counts
        if len(short) < len(values):
            self.long.update(values[values >= DENSE].tolist())

    def lengths(self) -> dict[str, float]:
        """As `statistics.lengths`."""
        seen = np.flatnonzero(self.dense)
        long = sorted(self.long)
        values = np.concatenate([seen, np.array(long, np.int64)])
        upto = np.cumsum(np.concatenate([self.dense[seen], np.array([self.long[v] for v in long], np.int64)]))

        def quantile(share: float) -> float:
            place = share * (self.total - 1)
            low, high = math.floor(place), math.ceil(place)
            below, above = values[np.searchsorted(upto, [low, high], side="right")]
            return float(below + (above - below) * (place - low))

        return {
            "p50": quantile(0.5),
            "p90": quantile(0.9),
            "p99": quantile(0.99),
            "max": int(values[-1]),
            "mean": self.sum / self.total,
        }


@dataclass
class Arrivals:
    """Running sums over stamps in order, nanoseconds."""

    first: int | None = None
    last: int = 0
    count: int = 0
    squared_gaps: float = 0.0
    window: dict[int, tuple[int, int]] = field(default_factory=lambda: {w: (0, 0) for w in WINDOWS_S})
    squared_counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WINDOWS_S, 0))

    def add(self, stamps: Ints) -> None:
        if not len(stamps):
            return
        if self.first is None:
            self.first = self.last = int(stamps[0])
        gaps = np.diff(stamps, prepend=self.last) / 1e9
        self.squared_gaps += float(gaps @ gaps)
        self.last = int(stamps[-1])
        self.count += len(stamps)
        seconds = (stamps - self.first) // 1_000_000_000
        for window, (current, held) in self.window.items():
            index, counts = _runs(seconds // window)
            if index[0] == current:
                counts[0] += held
            else:
                self.squared_counts[window] += held**2
            self.squared_counts[window] += int((counts[:-1] ** 2).sum())
            self.window[window] = (int(index[-1]), int(counts[-1]))

    @property
    def span_s(self) -> float:
        return 0.0 if self.first is None else (self.last - self.first) / 1e9

    def gap_cv(self) -> float | None:
        if self.count < 2 or self.span_s <= 0:
            return None
        mean = self.span_s / (self.count - 1)
        return math.sqrt(max(self.squared_gaps / (self.count - 1) - mean**2, 0.0)) / mean

    def dispersion(self, window_s: int) -> float | None:
        num_windows, in_last = self.window[window_s]
        if num_windows < 2:
            return None
        mean = (self.count - in_last) / num_windows
        return self.squared_counts[window_s] / num_windows / mean - mean if mean > 0 else None


def _runs(values: Ints) -> tuple[Ints, Ints]:
    """Distinct values of a sequence in order, and how often each occurs."""
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    return values[starts], np.diff(starts, append=len(values))


@dataclass
class Span:
    """Earliest and latest stamp, nanoseconds."""

    first: int | None = None
    last: int = 0

    def add(self, stamps: Ints) -> None:
        if len(stamps):
            low, high = int(stamps.min()), int(stamps.max())
            self.first, self.last = (
                (low, high) if self.first is None else (min(self.first, low), max(self.last, high))
            )

    @property
    def span_s(self) -> float:
        return 0.0 if self.first is None else (self.last - self.first) / 1e9


@dataclass
class Seen:
    """How many different sessions there were, one bit each."""

    bits: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1024, bool))

    def add(self, sessions: Ints) -> None:
        sessions = sessions[sessions >= 0]
        if len(sessions):
            most = int(sessions.max()) + 1
            if most > len(self.bits):
                self.bits = np.concatenate(
                    [self.bits, np.zeros(max(most, 2 * len(self.bits)) - len(self.bits), bool)]
                )
            self.bits[sessions] = True

    @property
    def num_seen(self) -> int:
        return int(self.bits.sum())
