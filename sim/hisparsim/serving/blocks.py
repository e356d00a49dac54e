"""The block pool: who holds which block, and in which order free blocks are handed out again.

The life of a block::

    free --take--> held --release--> free        not cached: to the head of the queue (used again first)
                        --release--> free        cached: to the tail (evicted last), still found by its key
                        --unpin----> free        to the tail; readers keep reading it until it is taken
    free --touch--> held                         a prefix hit or an adoption takes it out of the queue

The queue is an array of block ids with a moving head and tail; a block taken out of the middle leaves a
hole that is skipped later. Every operation works on arrays of ids, so a prefill chunk of ten thousand
blocks costs a few numpy calls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from hisparsim.serving.plan import IntArray

NO_KEY = np.int64(-1)
"""Key of a block whose content cannot be found by prefix."""

NULL_BLOCK = 0
"""Block 0 is never handed out: device tables use it for "not on this device"."""


@mypyc_attr(native_class=False)
class LawBroken(AssertionError):
    """A conservation law does not hold; the message prints both sides."""


class BlockPool:
    """Blocks ``1 .. num_blocks-1`` of one memory (GPU or host), with a free queue and a prefix index."""

    def __init__(self, num_blocks: int, name: str) -> None:
        if num_blocks < 2:
            raise ValueError(f"{name}: a pool of {num_blocks} blocks holds nothing besides the null block")
        self.name = name
        self.num_blocks = num_blocks
        self.ref = np.zeros(num_blocks, np.int32)
        """[num_blocks] holders of each block; 0 = in the free queue."""
        self.key = np.full(num_blocks, NO_KEY, np.int64)
        """[num_blocks] content key under which a block can be found, or ``NO_KEY``."""
        self.watched = np.zeros(num_blocks, np.bool_)
        """[num_blocks] unpinned and not taken again since: somebody may still read it."""
        self.on_reuse: Callable[[IntArray], None] | None = None
        """Called with the watched blocks among those being taken, before they change hands."""
        capacity = 4 * num_blocks
        self._queue = np.zeros(capacity, np.int64)
        self._where = np.full(num_blocks, -1, np.int64)  # position in the queue, -1 = not queued
        self._places = np.arange(capacity)
        self._head = num_blocks
        self._tail = self._head
        self._first: dict[int, int] = {}  # key -> block cached longest under it
        self._further: dict[int, list[int]] = {}  # key -> blocks cached under it later
        self._unpins = False  # some block was watched at some time
        self.num_free = 0
        self.num_watched_free = 0
        self._append(np.arange(1, num_blocks, dtype=np.int64))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_keyed_free(self) -> int:
        """Free blocks whose content can still be found."""
        return int(np.count_nonzero((self.key != NO_KEY) & (self.ref == 0)))

    # -- the queue --------------------------------------------------------------------------------

    def _append(self, blocks: IntArray) -> None:
        count = len(blocks)
        if self._tail + count > len(self._queue):
            self._compact()
        self._queue[self._tail : self._tail + count] = blocks
        self._where[blocks] = self._places[self._tail : self._tail + count]
        self._tail += count
        self.num_free += count

    def _prepend(self, blocks: IntArray) -> None:
        count = len(blocks)
        if self._head - count < 0:
            self._compact()
        self._head -= count
        self._queue[self._head : self._head + count] = blocks
        self._where[blocks] = self._places[self._head : self._head + count]
        self.num_free += count

    def _compact(self) -> None:
        blocks = self.free_order()
        self._head = (len(self._queue) - len(blocks)) // 2
        self._tail = self._head + len(blocks)
        self._queue[self._head : self._tail] = blocks
        self._where[blocks] = self._places[self._head : self._tail]

    def free_order(self) -> IntArray:
        """The free blocks in the order in which they would be taken. Changes nothing."""
        span = self._queue[self._head : self._tail]
        valid = self._where[span] == self._places[self._head : self._tail]
        order: IntArray = span[valid].copy()
        return order

    def _pop(self, count: int) -> IntArray:
        queue, where, head = self._queue, self._where, self._head
        if count == 1:
            while where[queue[head]] != head:
                head += 1
            block = queue[head]
            where[block] = -1
            self._head = head + 1
            self.num_free -= 1
            return np.array([block], np.int64)
        parts: list[IntArray] = []
        missing = count
        while missing:
            end = min(head + missing, self._tail)
            span = queue[head:end]
            valid = span[where[span] == self._places[head:end]]
            parts.append(valid)
            missing -= len(valid)
            head = end
        blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
        where[blocks] = -1
        self._head = head
        self.num_free -= count
        return blocks

    # -- holding and releasing --------------------------------------------------------------------

    def take(self, count: int) -> IntArray:
        """Hold ``count`` blocks from the head of the queue; what they cached is forgotten.

        Raises:
            ValueError: more blocks asked for than are free (callers test first).
        """
        if count > self.num_free:
            raise ValueError(f"{self.name}: {count} blocks asked for, {self.num_free} are free")
        if count == 0:
            return np.empty(0, np.int64)
        blocks = self._pop(count)
        if count == 1:  # most pages come one at a time: plain numbers are faster
            block = blocks[0]
            if self.watched[block]:
                self._reuse(blocks)
            if self.key[block] != NO_KEY:
                self._forget(blocks)
            self.ref[block] = 1
            return blocks
        if self.num_watched_free:
            reused = blocks[self.watched[blocks]]
            if len(reused):
                self._reuse(reused)
        if self._first:
            self._forget(blocks)
        self.ref[blocks] = 1
        return blocks

    def _reuse(self, blocks: IntArray) -> None:
        self.watched[blocks] = False
        self.num_watched_free -= len(blocks)
        if self.on_reuse is not None:
            self.on_reuse(blocks)

    def touch(self, blocks: IntArray) -> None:
        """Add one holder to each block; free ones leave the queue."""
        held = self.ref[blocks]
        free = blocks[held == 0]
        if len(free):
            self._where[free] = -1
            self.num_free -= len(free)
            if self.num_watched_free:
                self.num_watched_free -= int(np.count_nonzero(self.watched[free]))
        self.ref[blocks] = held + 1

    def release(self, blocks: IntArray) -> None:
        """Drop one holder of each block, in order of eviction: the first is taken again first.

        Blocks without a key go to the head of the queue, cached ones to its tail.
        """
        free = self._drop(blocks)
        if not len(free):
            return
        if self._unpins:
            self.num_watched_free += int(np.count_nonzero(self.watched[free]))
        cached = self.key[free] != NO_KEY
        num_cached = int(np.count_nonzero(cached))
        if num_cached < len(free):
            self._prepend(free[~cached] if num_cached else free)
        if num_cached:
            self._append(free[cached] if num_cached < len(free) else free)

    def _drop(self, blocks: IntArray) -> IntArray:
        """One holder less for each block; returns those that have none left."""
        held = self.ref[blocks] - 1
        self.ref[blocks] = held
        if not np.count_nonzero(held):
            return blocks
        free: IntArray = blocks[held == 0]
        return free

    def release_one_by_one(self, blocks: IntArray) -> None:
        """As :meth:`release` called with each block in turn: of uncached ones the last is taken first."""
        cached = self.key[blocks] != NO_KEY
        self.release(np.concatenate([blocks[~cached][::-1], blocks[cached]]))

    def unpin(self, blocks: IntArray) -> None:
        """Drop one holder of each block, whose content stays readable until the block is taken."""
        self._unpins = True
        free = self._drop(blocks)
        self.watched[blocks] = True
        self.num_watched_free += len(free)
        self._append(free)

    # -- the prefix index -------------------------------------------------------------------------

    def cache(self, blocks: IntArray, keys: NDArray[np.int64]) -> None:
        """Make each held block findable under its key, in place of the one it had."""
        had = self.key[blocks]
        if np.count_nonzero(had != NO_KEY):
            changed = had != keys
            blocks, keys = blocks[changed], keys[changed]
            self._forget(blocks)
        self.key[blocks] = keys
        first = self._first
        for block, key in zip(blocks.tolist(), keys.tolist(), strict=True):
            if first.setdefault(key, block) != block:
                self._further.setdefault(key, []).append(block)

    def _forget(self, blocks: IntArray) -> None:
        """Make blocks unfindable; those without a key are left out."""
        first, further = self._first, self._further
        had = self.key[blocks]
        keyed = had != NO_KEY
        num_keyed = int(np.count_nonzero(keyed))
        if num_keyed < len(blocks):
            if not num_keyed:
                return
            blocks, had = blocks[keyed], had[keyed]
        keys = had.tolist()
        self.key[blocks] = NO_KEY
        if not further:
            for key in keys:
                del first[key]
            return
        for block, key in zip(blocks.tolist(), keys, strict=True):
            others = further.get(key)
            if others is None:
                del first[key]
                continue
            if first[key] == block:
                first[key] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del further[key]

    def find(self, key: int) -> int | None:
        """The block cached longest under a key, or None. Changes nothing."""
        return self._first.get(key)

    def find_prefix(self, keys: list[int]) -> list[int]:
        """Blocks of the longest leading run of keys that are all cached. Changes nothing."""
        return list(iter(map(self._first.get, keys).__next__, None))  # type: ignore[arg-type]

    def num_free_among(self, blocks: IntArray) -> int:
        """How many of the blocks have no holder. Changes nothing."""
        return int(np.count_nonzero(self.ref[blocks] == 0))

    # -- laws -------------------------------------------------------------------------------------

    def check(self) -> None:
        """L1/L2: free + held = total, each block in one place, the index and the keys agree.

        Raises:
            LawBroken: with both sides.
        """
        order = self.free_order()
        if len(order) != self.num_free or len(np.unique(order)) != len(order):
            raise LawBroken(f"{self.name}: {len(order)} blocks queued, {self.num_free} counted as free")
        held = int(np.count_nonzero(self.ref > 0))
        if held + self.num_free != self.num_usable:
            raise LawBroken(f"{self.name}: {held} held + {self.num_free} free != {self.num_usable} blocks")
        if np.any(self.ref[order] != 0) or np.any(self.ref < 0) or self.ref[NULL_BLOCK] != 0:
            raise LawBroken(f"{self.name}: a queued block has a holder, or a count is negative")
        watched_free = int(np.count_nonzero(self.watched[order]))
        if watched_free != self.num_watched_free:
            raise LawBroken(
                f"{self.name}: {watched_free} watched free blocks, {self.num_watched_free} counted"
            )
        keyed = np.nonzero(self.key != NO_KEY)[0]
        indexed = {(key, block) for key, block in self._first.items()}
        indexed |= {(key, block) for key, blocks in self._further.items() for block in blocks}
        carried = set(zip(self.key[keyed].tolist(), keyed.tolist(), strict=True))
        if indexed != carried:
            raise LawBroken(f"{self.name}: {len(carried)} blocks carry a key, {len(indexed)} are indexed")
