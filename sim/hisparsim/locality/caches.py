"""Exact hot buffers: how many selected rows each step misses under LRU, FIFO, random or Belady replacement.

All start empty, load every missed row, never evict a row of the current selection and never count the newest
token (the last of a selection) as a miss, though it takes a slot. Rows used in the same step are equally
recent; lower positions leave first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Selection = NDArray[np.int64]


class CacheError(ValueError):
    """A buffer that cannot hold one selection."""


class Replacement(Enum):
    """Which row leaves a full buffer."""

    LRU = "lru"
    """The one unused for longest (the engines' rule)."""
    FIFO = "fifo"
    """The one loaded first; a row that is skipped because it is selected keeps its place."""
    RANDOM = "random"
    BELADY = "belady"
    """The one whose next use is farthest: the optimum, with the future known."""


def count_misses(
    selections: Iterable[Selection], hot_rows: int, replacement: Replacement, *, seed: int = 0
) -> NDArray[np.int64]:
    """Query: [steps] rows that each selection misses in a buffer of `hot_rows` rows.

    `seed` is for RANDOM. Raises CacheError where a selection exceeds the buffer.
    """
    stream = list(selections) if replacement is Replacement.BELADY else selections
    return _run(stream, hot_rows, _priority(replacement, stream, seed))


_Priority = Callable[[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""(step, candidates, loaded step of all, used step of all) -> [candidates] the least leaves first."""


def _priority(replacement: Replacement, stream: Iterable[Selection], seed: int) -> _Priority:
    match replacement:
        case Replacement.LRU:
            return lambda step, rows, loaded, used: used[rows]
        case Replacement.FIFO:
            return lambda step, rows, loaded, used: loaded[rows]
        case Replacement.RANDOM:
            rng = np.random.default_rng(seed)
            return lambda step, rows, loaded, used: rng.permutation(len(rows)).astype(np.int64)
        case Replacement.BELADY:
            following = _NextUse(list(stream))
            return lambda step, rows, loaded, used: -following.after(step)[rows]


def _run(stream: Iterable[Selection], hot_rows: int, priority: _Priority) -> NDArray[np.int64]:
    size = 0
    loaded = np.empty(0, dtype=np.int64)
    used = np.empty(0, dtype=np.int64)
    cached = np.empty(0, dtype=bool)
    misses: list[int] = []
    for step, selection in enumerate(stream):
        if len(selection) > hot_rows:
            raise CacheError(f"a buffer of {hot_rows} rows cannot hold a selection of {len(selection)}")
        top = int(selection.max()) + 1
        if top > len(cached):
            room = max(top, 2 * len(cached)) - len(cached)
            loaded = np.concatenate([loaded, np.zeros(room, dtype=np.int64)])
            used = np.concatenate([used, np.zeros(room, dtype=np.int64)])
            cached = np.concatenate([cached, np.zeros(room, dtype=bool)])
        fresh = selection[~cached[selection]]
        misses.append(len(fresh) - int(not cached[selection[-1]]))
        surplus = size + len(fresh) - hot_rows
        used[selection] = step
        if surplus > 0:
            candidates = np.flatnonzero(cached & (used < step))
            order = np.lexsort((candidates, priority(step, candidates, loaded, used)))
            cached[candidates[order[:surplus]]] = False
            size -= surplus
        cached[fresh] = True
        loaded[fresh] = step
        size += len(fresh)
    return np.asarray(misses, dtype=np.int64)


class _NextUse:
    """When each row is selected next, as the stream is walked from its start."""

    def __init__(self, stream: Sequence[Selection]) -> None:
        self._never = len(stream) + 1
        top = max((int(selection.max()) for selection in stream), default=-1) + 1
        upcoming = np.full(top, self._never, dtype=np.int64)
        self._after_use: list[NDArray[np.int64]] = []
        for step in range(len(stream) - 1, -1, -1):
            self._after_use.append(upcoming[stream[step]].copy())
            upcoming[stream[step]] = step
        self._after_use.reverse()
        self._upcoming = upcoming
        self._stream = stream
        self._step = -1

    def after(self, step: int) -> NDArray[np.int64]:
        """Change: walk on to `step`. Returns [rows] the next step after it that selects each row."""
        while self._step < step:
            self._step += 1
            self._upcoming[self._stream[self._step]] = self._after_use[self._step]
        return self._upcoming


def lru_misses_by_size(
    selections: Iterable[Selection], buffers: Sequence[int], *, skip_steps: int = 0
) -> NDArray[np.int64]:
    """Query: [steps - skip_steps, len(buffers)] misses of LRU buffers of all given sizes in one pass.

    LRU has the inclusion property: a buffer of B rows holds the B most recently used ones, so a row is missed
    by every buffer smaller than its rank. The first `skip_steps` steps only fill the buffers.
    """
    used = np.full(0, -1, dtype=np.int64)
    sizes = np.asarray(buffers, dtype=np.int64)
    misses: list[NDArray[np.int64]] = []
    for step, selection in enumerate(selections):
        top = int(selection.max()) + 1
        if top > len(used):
            used = np.concatenate([used, np.full(max(top, 2 * len(used)) - len(used), -1, dtype=np.int64)])
        if step >= skip_steps:
            seen = np.flatnonzero(used >= 0)
            order = seen[np.argsort(used[seen], kind="stable")]
            rank = np.full(len(used), np.iinfo(np.int64).max)
            rank[order] = np.arange(len(order), 0, -1)
            misses.append(np.sum(rank[selection[:-1]][:, None] > sizes[None, :], axis=0))
        used[selection] = step
    return np.asarray(misses, dtype=np.int64).reshape(-1, len(sizes))
