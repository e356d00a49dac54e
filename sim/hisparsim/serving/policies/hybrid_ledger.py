"""What ``hybrid`` keeps about a request: its pages on the GPU, in the host tier and between the two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.frames import NO_FRAME
from hisparsim.serving.ledger import RequestLedger
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import IntArray
from hisparsim.serving.request import Request

KEPT_TAIL_PAGES = 2
"""Pages at the end of a request that are never released: a step in flight may still write them."""


class HybridLedger(RequestLedger):
    """Pages of one request. Arrays are as long as the request can grow; ``num_pages`` of them count."""

    __slots__ = (
        "adopt_pages", "cached_host", "cached_index", "clean_pinned", "copies_recorded", "frames", "host",
        "host_valid", "hot", "index", "keys", "num_clean_pinned", "num_writing", "planned", "publish_pages",
        "ready_pages", "released", "request_id", "writing",
    )  # fmt: skip

    def __init__(self, request: Request, capacity: int) -> None:
        super().__init__()
        self.request_id = request.request_id
        self.keys = request.page_keys
        self.index: IntArray = np.zeros(capacity, np.int64)
        self.host: IntArray = np.zeros(capacity, np.int64)
        self.frames: IntArray = np.full(capacity, NO_FRAME, np.int64)
        self.hot: IntArray | None = None
        """[groups, hot pages] once leased."""
        self.host_valid: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        """The host copy of the page is complete."""
        self.released: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        """The page is read without being held."""
        self.clean_pinned: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        """The page is clean and still held."""
        self.num_clean_pinned = 0
        self.writing: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        """The page is being written back."""
        self.num_writing = 0
        self.planned = 0
        """Pages below it are written back or being so."""
        self.ready_pages = 0
        """Leading pages whose host copies are complete."""
        self.publish_pages: int | None = None
        """Full pages whose keys become findable in the host tier as soon as they are ready."""
        self.cached_host = 0
        self.cached_index = 0
        self.copies_recorded = 0
        self.adopt_pages = 0
        """Leading pages for which GPU copies are looked up once the admission's allocation is done."""

    def grow(self, pages: int) -> None:
        """Make room for so many pages."""
        extra = pages - len(self.index)
        if extra > 0:
            self.index = np.concatenate([self.index, np.zeros(extra, np.int64)])
            self.host = np.concatenate([self.host, np.zeros(extra, np.int64)])
            self.frames = np.concatenate([self.frames, np.full(extra, NO_FRAME, np.int64)])
            self.host_valid = np.concatenate([self.host_valid, np.zeros(extra, np.bool_)])
            more = np.zeros(extra, np.bool_)
            self.released = np.concatenate([self.released, more])
            self.clean_pinned = np.concatenate([self.clean_pinned, more])
            self.writing = np.concatenate([self.writing, more])

    def count_ready(self) -> None:
        """Change: bring ``ready_pages`` up to date with ``host_valid``."""
        lacking = np.nonzero(~self.host_valid[self.ready_pages : self.num_pages])[0]
        self.ready_pages = self.ready_pages + int(lacking[0]) if len(lacking) else self.num_pages

    def check(self, request: Request, limits: ServingLimits) -> None:
        """Laws L3 to L5 for the request, which runs.

        Raises:
            LawBroken: with both sides.
        """
        count = self.num_pages
        readable = self.frames[:count] != NO_FRAME
        host_valid = self.host_valid[:count]
        if int(np.count_nonzero(readable)) != self.num_readable:
            raise LawBroken(f"{request!r}: {self.num_readable} readable pages counted")
        if count < limits.pages(request.computed):
            raise LawBroken(f"L3: {request!r} computed more than its {count} pages hold")
        unreadable = ~readable & ~host_valid
        if np.any(unreadable):
            raise LawBroken(f"L3: {request!r} page {int(np.argmax(unreadable))} is nowhere readable")
        if self.num_readable < count and self.hot is None:
            raise LawBroken(f"L5: {request!r} is not fully on the GPU and owns no hot buffer")
        if np.any(self.released[:count] & ~host_valid):
            raise LawBroken(f"L4: {request!r} released a page whose host copy is not durable")


class PageTransfer:
    """Consecutive pages on their way to the host, or one on its way back.

    It holds host blocks and frames until it is done.
    """

    __slots__ = ("done", "end", "enqueued", "first", "frames", "host_blocks", "ledger", "restores")

    def __init__(
        self, ledger: HybridLedger, first: int, end: int, frames: IntArray, *, restores: bool = False
    ) -> None:
        self.ledger = ledger
        self.restores = restores
        self.first = first
        self.end = end
        self.frames = frames
        self.host_blocks = ledger.host[first:end].copy()
        self.enqueued = False
        self.done = False
