"""Prefix reuse: what an infinite cache saves, and an LRU cache of every size, exactly.

Ids are dense by first appearance and imply their prefix, so a block is new exactly when its id is the
largest yet.

A request looks its prompt up when it arrives and then touches its blocks from the last to the first, as
engines free them, so a prefix is always more recent than what stands behind it and the hits are always a
leading run. A block's stack distance is the number of distinct blocks touched since its own last touch,
when the request arrives: a cache of C blocks hits it when that is below C (Mattson et al., 1970).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .trace import Floats, Ints, Trace


@dataclass(frozen=True)
class Reuse:
    """Shares of prompt blocks and tokens found by an infinite cache. None without block ids."""

    blocks: float | None
    tokens: float


def ideal_reuse(trace: Trace) -> Reuse:
    """What an infinite cache would find; for traces without ids, what conversations declare to share."""
    total_tokens = int(trace.input_tokens.sum())
    if trace.block_tokens is None or not len(trace.block_ids):
        shared = int(trace.shared_prefix_tokens.sum())
        return Reuse(None, shared / total_tokens if total_tokens else 0.0)
    hits = leading_hits(trace)
    tokens = int(np.minimum(hits * trace.block_tokens, trace.input_tokens).sum())
    return Reuse(int(hits.sum()) / len(trace.block_ids), tokens / total_tokens if total_tokens else 0.0)


def leading_hits(trace: Trace) -> Ints:
    """Leading blocks of each prompt that an earlier request had. [n]"""
    ids = trace.block_ids
    before = np.maximum.accumulate(np.concatenate([[-1], ids[:-1]])) if len(ids) else ids
    seen = np.concatenate([[0], np.cumsum(ids <= before)])
    return np.asarray(seen[trace.block_offsets[1:]] - seen[trace.block_offsets[:-1]], np.int64)


@dataclass(frozen=True)
class StackDistances:
    """LRU stack distances of the blocks that had been touched before.

    Attributes:
        distances: [num_reused], ascending; with sampling, scaled to the whole.
        num_accesses: all block accesses, first ones included.
        num_distinct: blocks an infinite cache would hold.
        sample: the share of ids that was followed; 1.0 is exact.
    """

    distances: Floats
    num_accesses: int
    num_distinct: int
    sample: float

    def hit_share(self, cache_blocks: int) -> float:
        """Share of block accesses that an LRU cache of so many blocks hits."""
        if not self.num_accesses:
            return 0.0
        return float(np.searchsorted(self.distances, cache_blocks) / self.num_accesses)


def stack_distances(trace: Trace, *, sample: float = 1.0) -> StackDistances:
    """Exact distances, or those of a share of the ids chosen by hash (SHARDS, Waldspurger et al., FAST'15).

    Raises:
        TraceError: the trace has no block ids, or the share is not in (0, 1].
    """
    if trace.block_tokens is None:
        raise TraceError(f"trace {trace.name!r} has no block ids, so no reuse by cache size")
    if not 0 < sample <= 1:
        raise TraceError(f"sample {sample}: a share of the ids above 0 and at most 1")
    offsets, ids = trace.block_offsets, trace.block_ids
    if sample < 1:
        kept = hash_ids(ids) < np.uint64(int(sample * 2**63) * 2)
        offsets = np.concatenate([[0], np.cumsum(kept)])[offsets]
        ids = ids[kept]
    return distances_of(offsets, ids, sample)


def distances_of(offsets: Ints, ids: Ints, sample: float) -> StackDistances:
    """Distances of requests' blocks, [n+1] offsets into ids, which are this share of all ids."""
    # the last block of a request is touched first
    counts = np.diff(offsets)
    row_start = np.repeat(offsets[:-1], counts)
    row_end = np.repeat(offsets[1:], counts)
    sequence = ids[row_start + row_end - 1 - np.arange(len(ids))]
    before = previous_access(sequence)
    again = np.flatnonzero(before >= 0)
    last = before[again]
    distinct = (again - last - 1) - earlier_greater(last)
    at_arrival = distinct - (again - row_start[again])
    return StackDistances(np.sort(at_arrival / sample), len(sequence), len(sequence) - len(again), sample)


def previous_access(sequence: Ints) -> Ints:
    """Index of the previous equal element, -1 for the first. [n] -> [n]"""
    order = np.argsort(sequence, kind="stable")
    out = np.full(len(sequence), -1, np.int64)
    same = sequence[order[1:]] == sequence[order[:-1]]
    out[order[1:][same]] = order[:-1][same]
    return out


def earlier_greater(values: Ints) -> Ints:
    """For each element, how many earlier ones are greater; all are distinct. [n] -> [n], in n log n steps.

    Elements are held in order of value within halves, quarters, ... of the sequence, as a wavelet tree
    holds them: at each level those of a right half count the greater ones of their left half.
    """
    n = len(values)
    counts = np.zeros(n, np.int64)
    order = np.argsort(values, kind="stable")
    index = np.arange(n)
    for level in range(max(n - 1, 0).bit_length() - 1, -1, -1):
        right = (order >> level) & 1
        start = (order >> (level + 1)) << (level + 1)
        lefts = np.concatenate([[0], np.cumsum(1 - right)])
        lefts_before = lefts[:-1] - lefts[start]
        num_left = np.minimum(1 << level, n - start)
        is_right = right == 1
        counts[order[is_right]] += (num_left - lefts_before)[is_right]
        place = np.where(is_right, num_left + index - start - lefts_before, lefts_before) + start
        next_order = np.empty_like(order)
        next_order[place] = order
        order = next_order
    return counts


def hash_ids(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """splitmix64 of the ids. [n] -> [n]"""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
