"""Page frames: the GPU blocks, one a layer group, that hold one page's rows, and who reads them.

The life of a frame::

    allocate        a request's new page: held and read by it
    pin             one more holder (a write-back under way, a request that adopts the page)
    unpin           a holder lets go; the page stays readable until the pool takes one of its blocks
    release         a holder lets go of content that nobody may find again
    (pool takes a block of it)      every reader loses the page, a copy known by its key is forgotten

All blocks of a frame have the same number of holders. A *copy* is a frame whose page was published in the
host tier: a later request with the same prefix finds it by the page's key and reads it again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.blocks import NO_KEY, BlockPool, LawBroken
from hisparsim.serving.plan import IntArray

NO_FRAME = -1
"""Entry of a page table whose page is not readable on the GPU."""

_NOBODY = -1


class PageFrames:
    """Frames of ``num_groups`` blocks each, cut from a pool that also serves others."""

    def __init__(
        self,
        pool: BlockPool,
        num_groups: int,
        on_lost: Callable[[NDArray[np.int64], IntArray], None],
    ) -> None:
        """``on_lost(request_ids, pages)`` is called with the pages that readers lose to reuse."""
        capacity = pool.num_blocks // num_groups + 1
        self.pool = pool
        self.num_groups = num_groups
        self.blocks = np.zeros((capacity, num_groups), np.int64)
        """[frames, groups]"""
        self.ref = np.zeros(capacity, np.int32)
        """[frames] holders"""
        self.readers = np.zeros(capacity, np.int32)
        """[frames] running requests whose page table points here"""
        self.copies: dict[int, int] = {}
        """Page key -> frame that holds a copy of that host page."""
        self._copy_key = np.full(capacity, NO_KEY, np.int64)
        self._of_block = np.full(pool.num_blocks, NO_FRAME, np.int64)
        # Who reads a frame without holding it: mostly one request, further ones in a dictionary.
        self._loose_request = np.full(capacity, _NOBODY, np.int64)
        self._loose_page = np.zeros(capacity, np.int64)
        self._more_loose: dict[int, list[tuple[int, int]]] = {}
        self._unused = list(range(capacity - 1, -1, -1))
        self._on_lost = on_lost
        pool.on_reuse = self._reuse

    # -- queries ----------------------------------------------------------------------------------

    def num_read_blocks(self) -> tuple[int, int]:
        """Blocks that running requests read: (held, free as far as the pool counts them)."""
        read = self.readers > 0
        held = int(np.count_nonzero(read & (self.ref > 0)))
        return self.num_groups * held, self.num_groups * (int(np.count_nonzero(read)) - held)

    # -- changes ----------------------------------------------------------------------------------

    def allocate(self, count: int) -> IntArray:
        """[count] new frames, each with one holder that reads it."""
        blocks = self.pool.take(count * self.num_groups).reshape(self.num_groups, count)
        frames = np.array(self._unused[-count:][::-1], np.int64)
        del self._unused[-count:]
        self.blocks[frames] = blocks.T
        self._of_block[blocks] = frames
        self.ref[frames] = 1
        self.readers[frames] = 1
        return frames

    def pin(self, frames: IntArray) -> None:
        """One more holder for each frame."""
        self.pool.touch(self.blocks[frames].ravel())
        self.ref[frames] += 1

    def unpin(self, frames: IntArray, *, group_major: bool = False) -> None:
        """A holder of each frame lets go; blocks join the tail of the free queue in this order.

        Page by page, or with ``group_major`` all pages' blocks of one group before the next group's.
        """
        if len(frames):
            blocks = self.blocks[frames]
            self.pool.unpin((blocks.T if group_major else blocks).ravel())
            self.ref[frames] -= 1

    def add_shared_pin(self, frames: IntArray) -> None:
        """One more holder for each frame, and not the first one."""
        self.pool.ref[self.blocks[frames]] += 1
        self.ref[frames] += 1

    def drop_shared_pin(self, frames: IntArray) -> None:
        """A holder of each frame lets go, and is not the last one."""
        self.pool.ref[self.blocks[frames]] -= 1
        self.ref[frames] -= 1

    def read_loose(self, frames: IntArray, request_id: int, pages: IntArray) -> None:
        """A request goes on reading frames that it no longer holds."""
        taken = self._loose_request[frames] != _NOBODY
        alone = frames[~taken] if np.count_nonzero(taken) else frames
        self._loose_request[alone] = request_id
        self._loose_page[alone] = pages if alone is frames else pages[~taken]
        if alone is not frames:
            for frame, page in zip(frames[taken].tolist(), pages[taken].tolist(), strict=True):
                self._more_loose.setdefault(frame, []).append((request_id, page))

    def stop_reading(self, frames: IntArray, request_id: int, pages: IntArray) -> None:
        """A request no longer reads its pages in these frames, held or loose."""
        self.readers[frames] -= 1
        first = self._loose_request[frames] == request_id
        self._loose_request[frames[first]] = _NOBODY
        if self._more_loose:
            for frame, page in zip(frames.tolist(), pages.tolist(), strict=True):
                self._drop_further_reader(frame, request_id, page)
        self.retire_dead(frames)

    def _drop_further_reader(self, frame: int, request_id: int, page: int) -> None:
        further = self._more_loose.get(frame)
        if further is None:
            return
        if self._loose_request[frame] == _NOBODY:
            self._loose_request[frame], self._loose_page[frame] = further.pop(0)
        elif (request_id, page) in further:
            further.remove((request_id, page))
        if not further:
            del self._more_loose[frame]

    def release(self, frames: IntArray, *, group_major: bool) -> None:
        """A holder of each frame lets go; free blocks go to the head of the queue.

        The order of the queue is that of releasing them group after group, each group's pages in the given
        order (``group_major``), or frame after frame, each block on its own.
        """
        if not len(frames):
            return
        if group_major:
            self.pool.release(self.blocks[frames].T[::-1].ravel())
        else:
            self.pool.release(self.blocks[frames[::-1]][:, ::-1].ravel())
        self.ref[frames] -= 1
        self.retire_dead(frames)

    def retire_dead(self, frames: IntArray) -> None:
        """Forget those frames that have no holder, no reader and no copy."""
        dead = frames[
            (self.ref[frames] == 0)
            & (self._loose_request[frames] == _NOBODY)
            & (self._copy_key[frames] == NO_KEY)
            & (self._of_block[self.blocks[frames, 0]] == frames)
        ]
        if len(dead):
            self._retire(dead)

    def record_copies(self, frames: IntArray, keys: NDArray[np.int64]) -> None:
        """The frames hold copies of the host pages with these keys (older copies are forgotten)."""
        copies = self.copies
        for frame, key in zip(frames.tolist(), keys.tolist(), strict=True):
            older = copies.get(key)
            if older is not None:
                self._copy_key[older] = NO_KEY
                self.retire_dead(np.array([older], np.int64))
            copies[key] = frame
        self._copy_key[frames] = keys

    def _retire(self, frames: IntArray) -> None:
        self._of_block[self.blocks[frames]] = NO_FRAME
        self._unused.extend(frames.tolist())

    def _reuse(self, blocks: IntArray) -> None:
        of_block = self._of_block[blocks]
        hit = np.zeros(len(self.ref), np.bool_)  # each frame once and in order, faster than np.unique
        hit[of_block[of_block != NO_FRAME]] = True
        frames = hit.nonzero()[0]
        if not len(frames):
            return
        keys = self._copy_key[frames]
        for key in keys[keys != NO_KEY].tolist():
            del self.copies[key]
        self._copy_key[frames] = NO_KEY
        read = frames[self._loose_request[frames] != _NOBODY]
        request_ids, pages = self._loose_request[read], self._loose_page[read]
        if self._more_loose:
            further = [reader for frame in frames.tolist() for reader in self._more_loose.pop(frame, ())]
            request_ids = np.append(request_ids, [reader[0] for reader in further])
            pages = np.append(pages, np.array([reader[1] for reader in further], np.int64))
        self.readers[frames] = 0
        self._loose_request[frames] = _NOBODY
        self._retire(frames)
        if len(request_ids):
            self._on_lost(request_ids.astype(np.int64), pages)

    # -- laws -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each live frame's blocks point back at it and share its number of holders.

        Raises:
            LawBroken: with both sides.
        """
        live = np.nonzero(self._of_block[self.blocks[:, 0]] == np.arange(len(self.blocks)))[0]
        blocks: NDArray[np.int64] = self.blocks[live]
        if np.any(self._of_block[blocks] != live[:, None]):
            raise LawBroken("a block of a live page frame belongs to another frame")
        if np.any(self.pool.ref[blocks] != self.ref[live][:, None]):
            raise LawBroken("the blocks of a page frame have different numbers of holders")
        if len(live) + len(self._unused) != len(self.blocks):
            raise LawBroken(f"{len(live)} live and {len(self._unused)} unused of {len(self.blocks)} frames")
        for key, frame in self.copies.items():
            if self._copy_key[frame] != key:
                raise LawBroken(f"copy of page key {key} points at frame {frame}, which says otherwise")
        loose = (self._loose_request != _NOBODY).astype(np.int64)
        for frame, further in self._more_loose.items():
            loose[frame] += len(further)
        if np.any(self.readers[live] < loose[live]):
            raise LawBroken("a page frame has more loose readers than readers")
        if np.any(self.readers[live] > loose[live] + self.ref[live]):
            raise LawBroken("a page frame is read by more requests than hold it or read it loose")
