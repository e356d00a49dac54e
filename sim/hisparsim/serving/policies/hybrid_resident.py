"""Resident pages under ``hybrid``: held, released (read without being held), lost to reuse, adopted again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.blocks import BlockPool
from hisparsim.serving.frames import NO_FRAME, PageFrames
from hisparsim.serving.plan import Action, Adopt, IntArray, Lose, Release
from hisparsim.serving.policies.hybrid_ledger import KEPT_TAIL_PAGES, HybridLedger


class ResidentPages:
    """Which pages the requests read on the GPU, and the frames that hold them."""

    def __init__(
        self,
        pool: BlockPool,
        num_groups: int,
        host: BlockPool,
        ledgers: dict[int, HybridLedger],
        actions: list[Action],
    ) -> None:
        """``ledgers`` are those of the requests that hold memory; what is done is told in ``actions``."""
        self.frames = PageFrames(pool, num_groups, self._lose)
        self.num_lost = 0
        """Pages lost in this step."""
        self.num_adopted = 0
        """Pages adopted since the start."""
        self.num_adopting = 0
        """Requests that will look for copies of their prefix once their admission is done."""
        self._host = host
        self._ledgers = ledgers
        self._actions = actions
        self._lost: dict[int, list[IntArray]] = {}

    def adopt(self, ledger: HybridLedger) -> None:
        """Change: read prefix pages again where the GPU still holds a copy; hits may be scattered."""
        pages: list[int] = []
        frames: list[int] = []
        keys = self._host.key[ledger.host[: ledger.adopt_pages]].tolist()
        for page, key in enumerate(keys):
            frame = self.frames.copies.get(key)
            if frame is not None and ledger.frames[page] == NO_FRAME:
                pages.append(page)
                frames.append(frame)
        ledger.adopt_pages = 0
        self.num_adopting -= 1
        if not pages:
            return
        frame_array = np.array(frames, np.int64)
        page_array = np.array(pages, np.int64)
        self.frames.pin(frame_array)
        self.frames.readers[frame_array] += 1
        ledger.frames[page_array] = frame_array
        ledger.num_readable += len(pages)
        ledger.clean_pinned[page_array] = True
        ledger.num_clean_pinned += len(pages)
        self.num_adopted += len(pages)
        self._actions.append(Adopt(ledger.request_id, page_array, self.frames.blocks[frame_array]))

    def release_clean(self, ledger: HybridLedger) -> None:
        """Change: give clean pages to the pool, tail first: a prefix loses its tail before its head."""
        end = ledger.num_pages - KEPT_TAIL_PAGES
        pages = ledger.clean_pinned[: max(end, 0)].nonzero()[0][::-1]
        if len(pages):
            self.frames.unpin(self.release(ledger, pages))

    def release(self, ledger: HybridLedger, pages: IntArray) -> IntArray:
        """Change: pages are read without being held; the caller unpins the frames that are returned."""
        frames = ledger.frames[pages]
        self.frames.read_loose(frames, ledger.request_id, pages)
        ledger.released[pages] = True
        ledger.clean_pinned[pages] = False
        ledger.num_clean_pinned -= len(pages)
        self._actions.append(Release(ledger.request_id, pages))
        return frames

    def leave(self, ledger: HybridLedger) -> IntArray:
        """Change: a request that left reads nothing any more, and its clean pages stay behind as copies.

        Returns:
            The frames of its dirty pages, which it still holds.
        """
        pages = (ledger.frames[: ledger.num_pages] != NO_FRAME).nonzero()[0][::-1]
        frames = ledger.frames[pages]
        loose = ledger.released[pages]
        clean = ~loose & ledger.host_valid[pages] & ~ledger.writing[pages]
        self.frames.unpin(frames[clean], group_major=True)
        self.frames.stop_reading(frames, ledger.request_id, pages)
        self.frames.retire_dead(frames[clean])
        dirty: IntArray = frames[~loose & ~clean]
        return dirty

    def _lose(self, request_ids: NDArray[np.int64], pages: IntArray) -> None:
        """The pool took a block of released pages."""
        self.num_lost += len(pages)
        losers = sorted(set(request_ids.tolist()))
        for request_id in losers:
            ledger = self._ledgers[request_id]
            own = pages[request_ids == request_id] if len(losers) > 1 else pages
            ledger.frames[own] = NO_FRAME
            ledger.released[own] = False
            ledger.num_readable -= len(own)
            self._lost.setdefault(request_id, []).append(own)

    def tell_lost(self) -> None:
        """Change: losses since the last call are told."""
        for request_id, pages in self._lost.items():
            self._actions.append(Lose(request_id, np.concatenate(pages)))
        self._lost.clear()
