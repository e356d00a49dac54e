"""From parsed chunks to one Trace: sorted, numbered, interned, every row accounted for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from .blocks import BlockColumns, fit_block_counts, intern_blocks
from .errors import TraceError
from .files import sha256_of
from .kinds import joined as joined_kinds
from .rows import NO_STAMP, Chunk, Format, Rejected
from .selecting import renumber
from .trace import Floats, Ints, LoadReport, Trace, no_blocks, offered

Wraps = Literal["sort", "continue", "error"]
WRAP_NS = 60_000_000_000  # smaller steps back are jitter between servers, not a clock that started again
PER_FILE = 1 << 40  # lines of the k-th file of a folder are numbered from k * 2^40 while reading


@dataclass
class Collected:
    """Chunks on their way to one trace, and the account of what was left out or changed."""

    path: Path
    strict: bool
    wraps: Wraps = "sort"
    chunks: list[Chunk] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)
    num_blank: int = 0

    def take(self, chunk: Chunk) -> None:
        for rejected in chunk.rejected:
            self._strictly(rejected, "dropped")
            self.dropped[rejected.reason] += 1
        for changed in chunk.changed:
            self._strictly(changed, "changed")
            self.changed[changed.reason] += 1
        self.notes.update(dict.fromkeys(chunk.notes))
        self.num_blank += chunk.num_blank
        chunk.rejected, chunk.changed = [], []
        self.chunks.append(chunk)

    def _strictly(self, row: Rejected, what: str) -> None:
        if self.strict:
            row.refuse(what, self.path)

    def trace(self, files: list[Path], chosen: Format) -> Trace:
        """Every readable row, in order, before any policy."""
        chunks = self.chunks
        line = _joined([c.line for c in chunks])
        n = len(line)
        time_ns = _joined([c.time_ns for c in chunks])
        if not chosen.own_clocks and self.wraps != "sort":
            time_ns = self._without_wraps(time_ns, line)
        inputs = _joined([c.input_tokens for c in chunks])
        session = _joined([_or(c.session, len(c), -1) for c in chunks])
        turn = _joined([_or(c.turn, len(c), 0) for c in chunks])
        parent = _joined([_or(c.parent, len(c), -1) for c in chunks])
        shared = _joined([_or(c.shared_prefix_tokens, len(c), 0) for c in chunks])
        think = np.concatenate(
            [np.zeros(0), *(np.full(len(c), np.nan) if c.think_s is None else c.think_s for c in chunks)]
        )
        blocks = self._blocks(chosen, inputs, line)
        kinds = joined_kinds((c.kind, len(c)) for c in chunks)

        key = sort_keys(time_ns, parent)
        order = np.argsort(key, kind="stable")
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        parent = np.where(parent >= 0, place[np.maximum(parent, 0)], -1)[order]
        stamps = time_ns[order]
        arrival = seconds_from_first(stamps)
        if self.num_blank:
            self.notes[f"{self.num_blank} blank lines passed over"] = None
        block_tokens, offsets, ids = no_blocks(n) if blocks is None else blocks.reordered(order)
        digest = sha256_of(files[0]) if len(files) == 1 else _sha256_of_all(files)
        steps = np.diff(time_ns[time_ns != NO_STAMP])
        return Trace(
            name=self.path.name.split(".")[0],
            format=chosen.name,
            sha256=digest,
            arrival_s=arrival,
            input_tokens=inputs[order],
            output_tokens=_joined([c.output_tokens for c in chunks])[order],
            session=renumber(session[order]),
            turn=turn[order],
            parent=parent,
            think_s=think[order],
            shared_prefix_tokens=shared[order],
            block_tokens=block_tokens,
            block_offsets=offsets,
            block_ids=ids,
            source_line=line[order] % PER_FILE,
            kind=None if kinds is None else kinds.take(order),
            loading=LoadReport(
                rows_read=n + sum(self.dropped.values()),
                rows_kept=n,
                rows_dropped=dict(self.dropped),
                changed=dict(self.changed),
                inversions=0 if chosen.own_clocks else int((steps < 0).sum()),
                ties=int((steps == 0).sum()),
                notes=tuple(self.notes),
                offered=offered(arrival),
            ),
        )

    def _without_wraps(self, time_ns: Ints, line: Ints) -> Ints:
        """Stamps that run on where the clock jumped back by more than a minute. [n]"""
        stamped = np.flatnonzero(time_ns != NO_STAMP)
        steps = np.diff(time_ns[stamped])
        back = np.flatnonzero(steps < -WRAP_NS)
        if not len(back):
            return time_ns
        if self.wraps == "error":
            raise TraceError(
                f"the clock jumps back by {-int(steps[back[0]]) / 1e9:g} s: choose wraps 'sort' (by stamp) "
                "or 'continue' (two recordings one after the other)",
                path=self.path,
                line=int(line[stamped[back[0] + 1]]) % PER_FILE,
            )
        shift = np.zeros(len(stamped), np.int64)
        shift[back + 1] = -steps[back]
        out = time_ns.copy()
        out[stamped] += np.cumsum(shift)
        self.changed["stamps moved behind the clock's jump back"] += int((np.cumsum(shift) > 0).sum())
        return out

    def _blocks(self, chosen: Format, inputs: Ints, line: Ints) -> BlockColumns | None:
        sizes = {c.block_tokens for c in self.chunks if len(c)}
        if chosen.block_rule is None or sizes <= {None}:
            return None
        if len(sizes) != 1:
            known = ", ".join(str(size) for size in sorted(s for s in sizes if s is not None))
            raise TraceError(f"mixes block sizes ({known}): split it by size", path=self.path)
        size = sizes.pop()
        assert size is not None
        counts = _joined([_or(c.block_counts, len(c), 0) for c in self.chunks])
        ids = np.concatenate([c.block_ids for c in self.chunks if c.block_ids is not None])
        fitted = fit_block_counts(inputs, counts, ids, size, chosen.block_rule, self.path, chosen.name)
        for reason, rows in fitted.changed.items():
            self._strictly(Rejected(int(line[rows[0]]), reason, ""), "changed")
            self.changed[reason] += len(rows)
        columns, split = intern_blocks(fitted.counts, fitted.ids, size)
        if split:
            self.changed["ids seen behind different prefixes, told apart"] += split
        return columns


def _or(column: Ints | None, n: int, value: int) -> Ints:
    return np.full(n, value, np.int64) if column is None else column


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate([*columns, np.zeros(0, np.int64)])


def _sha256_of_all(files: list[Path]) -> str:
    import hashlib

    return hashlib.sha256("".join(sha256_of(path) for path in files).encode()).hexdigest()


def sort_keys(time_ns: Ints, parent: Ints) -> Ints:
    """Each row's own stamp, but never before its parent's; a row without a stamp takes its parent's. [n]"""
    key = time_ns.copy()
    children = np.flatnonzero(parent >= 0)
    for row in children.tolist():  # in file order, where parents stand first
        key[row] = max(key[row], key[parent[row]])
    return key


def seconds_from_first(stamps: Ints) -> Floats:
    """Seconds after the earliest stamp; NaN where there is none. [n]"""
    known = stamps != NO_STAMP
    arrival = np.full(len(stamps), np.nan)
    if known.any():
        arrival[known] = (stamps[known] - stamps[known].min()) / 1e9
    return arrival
