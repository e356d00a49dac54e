"""The statistics of a file of any size, in one pass and bounded memory.

Lengths are counted by value, arrivals by running sums. Only a file whose stamps go backwards is read a
second time, for its stamps alone (8 bytes a row), since gaps and windows need them in order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .files import sha256_of
from .loading import read_chunks
from .policies import is_zero, zero_rows
from .rows import Chunk, Format, Options, Rejected
from .statistics import CONTEXT_MARKS, WINDOWS_S, rate
from .trace import Ints

_DENSE = 1 << 20  # lengths below are counted in an array, longer ones in a dictionary


def stream_info(
    path: Path,
    chosen: Format,
    *,
    strict: bool = False,
    zero_tokens: str = "drop",
    **options: Any,
) -> dict[str, Any]:
    """As `file_info`, for formats without block ids. Raises TraceError as `load` does."""
    reading = Options(**options)
    unknown = reading.given() - chosen.takes
    if unknown:
        raise TraceError(f"format {chosen.name} does not take {', '.join(sorted(unknown))}", path=path)
    sums = _Sums(path, strict)
    for chunk in read_chunks([path], chosen, reading):
        sums.take(chunk)
    if not sums.inputs.total:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sums.dropped.items())
        raise TraceError(f"holds no usable request (dropped: {dropped or 'nothing was there'})", path=path)
    all_arrivals = (
        _sorted_arrivals(path, chosen, reading, sums.num_rows) if sums.inversions else sums.recorded
    )
    span_s = all_arrivals.span_s
    notes = list(sums.notes)
    if sums.num_blank:
        notes.append(f"{sums.num_blank} blank lines passed over")
    return {
        "name": path.name.split(".")[0],
        "format": chosen.name,
        "sha256": sha256_of(path),
        "rows_read": sums.num_rows + sums.num_rejected,
        "rows_kept": sums.inputs.total,
        "rows_dropped": dict(sums.dropped),
        "rows_changed": dict(sums.changed),
        "inversions": sums.inversions,
        "ties": sums.ties,
        "notes": notes,
        "num_requests": sums.inputs.total,
        "sum_input_tokens": sums.sum_input,
        "sum_output_tokens": sums.sum_output,
        "span_s": span_s,
        "rate_per_s": rate(sums.num_rows, span_s),
        "interarrival_cv": all_arrivals.gap_cv(),
        "burstiness": {f"{window}s": all_arrivals.dispersion(window) for window in WINDOWS_S},
        "block_tokens": None,
        "ideal_block_reuse": None,
        "ideal_token_reuse": sums.shared / sums.sum_input if sums.sum_input else 0.0,
        "num_sessions": sums.sessions.num_seen,
        "input_tokens": sums.inputs.lengths(),
        "output_tokens": sums.outputs.lengths(),
        "share_above": {mark: count / sums.inputs.total for mark, count in sums.above.items()},
        "kept": {
            "sum_input_tokens": sums.inputs.sum,
            "sum_output_tokens": sums.outputs.sum,
            "span_s": sums.kept.span_s,
            "rate_per_s": rate(sums.inputs.total, sums.kept.span_s),
        },
        "reuse_by_cache": None,
    }


@dataclass
class _Lengths:
    """How often each length occurs."""

    dense: Ints = field(default_factory=lambda: np.zeros(_DENSE, np.int64))
    long: Counter[int] = field(default_factory=Counter)
    total: int = 0
    sum: int = 0

    def add(self, values: Ints) -> None:
        self.total += len(values)
        self.sum += int(values.sum())
        short = values[values < _DENSE]
        counts = np.bincount(short)
        self.dense[: len(counts)] += counts
        if len(short) < len(values):
            self.long.update(values[values >= _DENSE].tolist())

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
class _Arrivals:
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
class _Span:
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
class _Sums:
    path: Path
    strict: bool
    inputs: _Lengths = field(default_factory=_Lengths)
    outputs: _Lengths = field(default_factory=_Lengths)
    recorded: _Arrivals = field(default_factory=_Arrivals)
    kept: _Span = field(default_factory=_Span)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    above: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CONTEXT_MARKS, 0)))
    notes: dict[str, None] = field(default_factory=dict)
    num_rows: int = 0
    num_rejected: int = 0
    num_blank: int = 0
    sum_input: int = 0
    sum_output: int = 0
    shared: int = 0
    inversions: int = 0
    ties: int = 0
    sessions: _Seen = field(default_factory=lambda: _Seen())
    _last: int | None = None

    def take(self, chunk: Chunk) -> None:
        for row in chunk.rejected:
            self._strictly(row, "dropped")
            self.dropped[row.reason] += 1
        for row in chunk.changed:
            self._strictly(row, "changed")
            self.changed[row.reason] += 1
        self.num_rejected += len(chunk.rejected)
        self.num_blank += chunk.num_blank
        self.notes.update(dict.fromkeys(chunk.notes))
        if not len(chunk):
            return
        self.num_rows += len(chunk)
        self.sum_input += int(chunk.input_tokens.sum())
        self.sum_output += int(chunk.output_tokens.sum())
        if chunk.shared_prefix_tokens is not None:
            self.shared += int(chunk.shared_prefix_tokens.sum())
        steps = np.diff(chunk.time_ns, prepend=chunk.time_ns[0] if self._last is None else self._last)
        self.inversions += int((steps < 0).sum())
        self.ties += int((steps == 0).sum()) - (self._last is None)
        self._last = int(chunk.time_ns[-1])
        zero = is_zero(chunk.input_tokens, chunk.output_tokens)
        if zero.any():
            for reason, rows in zero_rows(chunk.input_tokens, chunk.output_tokens).items():
                self._strictly(Rejected(int(chunk.line[rows[0]]), reason, ""), "dropped")
                self.dropped[reason] += len(rows)
        inputs, outputs = chunk.input_tokens[~zero], chunk.output_tokens[~zero]
        self.inputs.add(inputs)
        self.outputs.add(outputs)
        for mark, limit in CONTEXT_MARKS.items():
            self.above[mark] += int((inputs + outputs > limit).sum())
        if chunk.session is not None:
            self.sessions.add(chunk.session[~zero])
        self.kept.add(chunk.time_ns[~zero])
        if not self.inversions:
            self.recorded.add(chunk.time_ns)

    def _strictly(self, row: Rejected, what: str) -> None:
        if self.strict:
            detail = f" ({row.detail})" if row.detail else ""
            raise TraceError(
                f"{row.reason}{detail}: the row would be {what}, which strict loading refuses",
                path=self.path,
                line=row.line,
            )


@dataclass
class _Seen:
    """How many different sessions there were, one bit each."""

    bits: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(default_factory=lambda: np.zeros(1024, bool))

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


def _sorted_arrivals(path: Path, chosen: Format, options: Options, num_rows: int) -> _Arrivals:
    """The arrivals of all rows in order of time; holds 8 bytes a row."""
    time_ns = np.empty(num_rows, np.int64)
    at = 0
    for chunk in read_chunks([path], chosen, options):
        time_ns[at : at + len(chunk)] = chunk.time_ns
        at += len(chunk)
    time_ns.sort()
    arrivals = _Arrivals()
    for start in range(0, len(time_ns), _DENSE):
        arrivals.add(time_ns[start : start + _DENSE])
    return arrivals
