"""The statistics of a file of any size, in one pass and bounded memory.

Lengths are counted by value, arrivals by running sums. Only a file whose stamps go backwards is read a
second time, for its stamps alone (8 bytes a row), since gaps and windows need them in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .files import sha256_of
from .kinds import most_first
from .loading import read_chunks
from .policies import is_zero, zero_rows
from .reuse_stream import StreamedReuse
from .rows import NO_STAMP, Chunk, Format, Options, Rejected
from .running import Arrivals, Lengths, Seen, Span
from .statistics import CONTEXT_MARKS, WINDOWS_S, curve_of, rate

_SLICE = 1 << 20


def stream_info(
    path: Path,
    chosen: Format,
    *,
    strict: bool = False,
    zero_tokens: str = "drop",
    **options: Any,
) -> dict[str, Any]:
    """As `file_info`, in one pass. Raises TraceError as `load` does."""
    reading = Options(**options)
    unknown = reading.given() - chosen.takes
    if unknown:
        raise TraceError(f"format {chosen.name} does not take {', '.join(sorted(unknown))}", path=path)
    sums = _Sums(path, strict)
    reuse = StreamedReuse(path, chosen.name, chosen.block_rule or "ceil")
    for chunk in read_chunks([path], chosen, reading):
        sums.take(chunk)
        reuse.add(chunk, ~is_zero(chunk.input_tokens, chunk.output_tokens))
        if strict and reuse.changed:
            reason = next(iter(reuse.changed))
            raise TraceError(f"{reason}: the row would be changed, which strict loading refuses", path=path)
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
        "rows_changed": {**sums.changed, **reuse.changed},
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
        "block_tokens": reuse.block_tokens,
        "ideal_block_reuse": reuse.num_hits / reuse.num_blocks if reuse.num_blocks else None,
        "ideal_token_reuse": (reuse.hit_tokens if reuse.num_blocks else sums.shared) / max(sums.sum_input, 1),
        "num_sessions": sums.sessions.num_seen,
        "kinds": most_first(sums.kinds.items()) or None,
        "input_tokens": sums.inputs.lengths(),
        "output_tokens": sums.outputs.lengths(),
        "share_above": {mark: count / sums.inputs.total for mark, count in sums.above.items()},
        "kept": {
            "sum_input_tokens": sums.inputs.sum,
            "sum_output_tokens": sums.outputs.sum,
            "span_s": sums.kept.span_s,
            "rate_per_s": rate(sums.inputs.total, sums.kept.span_s),
        },
        "reuse_by_cache": None
        if reuse.block_tokens is None or not reuse.num_blocks
        else curve_of(reuse.distances(), reuse.block_tokens),
    }


@dataclass
class _Sums:
    path: Path
    strict: bool
    inputs: Lengths = field(default_factory=Lengths)
    outputs: Lengths = field(default_factory=Lengths)
    recorded: Arrivals = field(default_factory=Arrivals)
    kept: Span = field(default_factory=Span)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    above: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CONTEXT_MARKS, 0)))
    kinds: Counter[str] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)
    num_rows: int = 0
    num_rejected: int = 0
    num_blank: int = 0
    sum_input: int = 0
    sum_output: int = 0
    shared: int = 0
    inversions: int = 0
    ties: int = 0
    sessions: Seen = field(default_factory=Seen)
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
        stamped = chunk.time_ns != NO_STAMP
        stamps = chunk.time_ns[stamped]
        if len(stamps):
            steps = np.diff(stamps, prepend=stamps[0] if self._last is None else self._last)
            self.inversions += int((steps < 0).sum())
            self.ties += int((steps == 0).sum()) - (self._last is None)
            self._last = int(stamps[-1])
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
        if chunk.kind is not None:
            kept = chunk.kind.take(~zero)
            self.kinds.update({} if kept is None else kept.counts())
        self.kept.add(chunk.time_ns[stamped & ~zero])
        if not self.inversions:
            self.recorded.add(stamps)

    def _strictly(self, row: Rejected, what: str) -> None:
        if self.strict:
            row.refuse(what, self.path)


def _sorted_arrivals(path: Path, chosen: Format, options: Options, num_rows: int) -> Arrivals:
    """The arrivals of all rows in order of time; holds 8 bytes a row."""
    time_ns = np.empty(num_rows, np.int64)
    at = 0
    for chunk in read_chunks([path], chosen, options):
        stamps = chunk.time_ns[chunk.time_ns != NO_STAMP]
        time_ns[at : at + len(stamps)] = stamps
        at += len(stamps)
    time_ns = time_ns[:at]
    time_ns.sort()
    arrivals = Arrivals()
    for start in range(0, len(time_ns), _SLICE):
        arrivals.add(time_ns[start : start + _SLICE])
    return arrivals
