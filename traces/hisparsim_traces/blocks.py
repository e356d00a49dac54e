"""Block ids: the format's count rule, scopes resolved, 64-bit ids interned to dense ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .selecting import gather_ranges, renumber
from .trace import Ints

KNOWN_SIZES = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class BlockColumns:
    """Interned ids of a trace. counts: [n], ids: [sum(counts)]"""

    block_tokens: int
    counts: Ints
    ids: Ints

    def reordered(self, order: Ints) -> tuple[int, Ints, Ints]:
        """(block_tokens, block_offsets, block_ids) of the rows in another order."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[order]
        ids = self.ids[gather_ranges(starts[order], counts)]
        return self.block_tokens, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), renumber(ids)


@dataclass(frozen=True)
class Fitted:
    counts: Ints
    ids: NDArray[np.uint64]
    changed: dict[str, Ints]  # reason -> rows


def fit_block_counts(
    inputs: Ints,
    counts: Ints,
    ids: NDArray[np.uint64],
    size: int,
    rule: str,
    path: Path,
    name: str,
) -> Fitted:
    """Counts that obey the rule: ids beyond the prompt are cut, missing ones leave the rest unshared.

    Raises:
        TraceError: most rows break the rule, which means another block size (the one that fits is named).
    """
    if rule == "given":
        return Fitted(counts, ids, {})
    upper = -(-inputs // size)
    rows = np.flatnonzero(counts > 0)
    whole = inputs // size
    allowed = (counts == upper) if rule == "ceil" else (counts == whole) | (counts == upper)
    broken = rows[~allowed[rows]]
    if len(broken) * 2 > len(rows):
        fitting = [
            other
            for other in KNOWN_SIZES
            if np.mean(
                counts[rows] == (-(-inputs[rows] // other) if rule == "ceil" else inputs[rows] // other)
            )
            > 0.9
        ]
        advice = f"{fitting[0]} tokens a block would fit" if fitting else "no usual block size fits"
        row = int(broken[0])
        raise TraceError(
            f"{len(broken)} of {len(rows)} rows break the rule of {name}, {rule}(input / {size}) block ids "
            f"(first: {inputs[row]} tokens with {counts[row]} ids): {advice}; give block_tokens "
            "(--block-tokens)",
            path=path,
        )
    most = upper if rule == "ceil" else whole
    fitted = np.minimum(counts, most)
    changed: dict[str, Ints] = {}
    tail = rows[(counts[rows] == upper[rows]) & (upper[rows] > most[rows])]
    if len(tail):
        changed["id of the partial last block cut off"] = tail
    long = rows[counts[rows] > upper[rows]]
    if len(long):
        changed["more block ids than the prompt has blocks, cut off"] = long
    short = rows[counts[rows] < np.minimum(most, upper)[rows]]
    if len(short):
        changed["fewer block ids than the prompt has blocks, the rest unshared"] = short
    if not changed:
        return Fitted(counts, ids, changed)
    starts = np.cumsum(counts) - counts
    return Fitted(fitted, ids[gather_ranges(starts, fitted)], changed)


def intern_blocks(counts: Ints, ids: NDArray[np.uint64], size: int) -> tuple[BlockColumns, int]:
    """Dense ids by first appearance, and how many ids had to be told apart.

    An id must imply its whole prefix. Where one stands behind different ids, each (prefix, id) becomes an
    id of its own, so that equal ids always mean equal prefixes.
    """
    _, dense = np.unique(ids, return_inverse=True)
    dense = dense.astype(np.int64)
    starts = np.cumsum(counts) - counts
    before = np.empty_like(dense)
    before[1:] = dense[:-1]
    before[starts[counts > 0]] = -1
    num_ids = int(dense.max()) + 1 if len(dense) else 0
    pairs = np.unique((before + 1) * (num_ids + 1) + dense)
    split = len(pairs) - num_ids
    if split:
        dense = _chained(counts, dense)
    return BlockColumns(size, counts, renumber(dense)), split


def _chained(counts: Ints, ids: Ints) -> Ints:
    chain: dict[tuple[int, int], int] = {}
    out = np.empty_like(ids)
    at = 0
    for count in counts.tolist():
        prefix = -1
        for offset in range(at, at + count):
            prefix = chain.setdefault((prefix, int(ids[offset])), len(chain))
            out[offset] = prefix
        at += count
    return out
