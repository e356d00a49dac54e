"""Reuse of a file of any size: memory by distinct blocks, and a sample of the ids once accesses are many.

Ids must imply their prefix, as prefix hashes do; unlike loading, a stream does not tell apart those that do
not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .blocks import fit_block_counts
from .reuse import StackDistances, distances_of, hash_ids
from .rows import Chunk
from .selecting import gather_ranges
from .trace import Ints

MAX_ACCESSES = 4_000_000  # above, the sampled share of the ids is halved

Ids = NDArray[np.uint64]


@dataclass
class IdSet:
    """A set of 64-bit ids in sorted arrays, merged as they grow: 8 bytes an id, at most 16 while merging."""

    parts: list[Ids] = field(default_factory=list)

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of the ids are in the set. [n]"""
        found = np.zeros(len(ids), bool)
        for part in self.parts:
            place = np.minimum(np.searchsorted(part, ids), len(part) - 1)
            found |= part[place] == ids
        return found

    def add(self, ids: Ids) -> None:
        """Add sorted ids that the set does not hold."""
        if not len(ids):
            return
        self.parts.append(ids)
        while len(self.parts) > 1 and len(self.parts[-1]) * 2 > len(self.parts[-2]):
            last = self.parts.pop()
            merged = np.concatenate([self.parts.pop(), last])
            merged.sort(kind="stable")
            self.parts.append(merged)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass
class StreamedReuse:
    """Ideal reuse of all rows, and LRU distances of the kept ones, chunk by chunk.

    Attributes:
        changed: rows whose ids broke the format's count rule, by reason, as loading counts them.
    """

    path: Path
    format_name: str
    rule: str
    block_tokens: int | None = None
    changed: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0
    num_hits: int = 0
    hit_tokens: int = 0
    sample: float = 1.0
    _seen: IdSet = field(default_factory=IdSet)
    _ids: list[Ids] = field(default_factory=list)
    _counts: list[Ints] = field(default_factory=list)
    _held: int = 0

    def add(self, chunk: Chunk, kept: NDArray[np.bool_]) -> None:
        """Take in a chunk, of which `kept` [n] rows will be replayed."""
        if chunk.block_counts is None or chunk.block_ids is None or chunk.block_tokens is None:
            return
        size = self.block_tokens = chunk.block_tokens
        fitted = fit_block_counts(
            chunk.input_tokens,
            chunk.block_counts,
            chunk.block_ids,
            size,
            self.rule,
            self.path,
            self.format_name,
        )
        for reason, rows in fitted.changed.items():
            self.changed[reason] = self.changed.get(reason, 0) + len(rows)
        self._count_hits(chunk.input_tokens, fitted.counts, fitted.ids)
        starts = np.cumsum(fitted.counts) - fitted.counts
        self._follow(fitted.counts[kept], fitted.ids[gather_ranges(starts[kept], fitted.counts[kept])])

    def _count_hits(self, inputs: Ints, counts: Ints, ids: Ids) -> None:
        distinct, first = np.unique(ids, return_index=True)
        fresh = ~self._seen.holds(distinct)
        new = np.zeros(len(ids), bool)
        new[first[fresh]] = True
        self._seen.add(distinct[fresh])
        ends = np.cumsum(counts)
        miss = np.concatenate([np.flatnonzero(new), [len(ids)]])
        starts = ends - counts
        hits = np.minimum(miss[np.searchsorted(miss, starts)], ends) - starts
        self.num_blocks += len(ids)
        self.num_hits += int(hits.sum())
        self.hit_tokens += int(np.minimum(hits * (self.block_tokens or 0), inputs).sum())

    def _follow(self, counts: Ints, ids: Ids) -> None:
        self._ids.append(ids)
        self._counts.append(counts)
        if self.sample < 1:
            self._thin(len(self._ids) - 1)
        self._held += len(self._ids[-1])
        while self._held > MAX_ACCESSES:
            self.sample /= 2
            for part in range(len(self._ids)):
                self._thin(part)
            self._held = sum(len(part) for part in self._ids)

    def _thin(self, part: int) -> None:
        """Keep the sampled ids of a part, and rows that have any."""
        ids, counts = self._ids[part], self._counts[part]
        keep = hash_ids(ids) < np.uint64(int(self.sample * 2**63) * 2)
        ends = np.concatenate([[0], np.cumsum(keep)])[np.cumsum(counts)]
        counts = np.diff(ends, prepend=0)
        self._ids[part], self._counts[part] = ids[keep], counts[counts > 0]

    def distances(self) -> StackDistances:
        """LRU stack distances of what was followed."""
        counts = np.concatenate([*self._counts, np.zeros(0, np.int64)])
        ids = np.concatenate([*self._ids, np.zeros(0, np.uint64)])
        _, dense = np.unique(ids, return_inverse=True)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return distances_of(offsets, dense.astype(np.int64), self.sample)
