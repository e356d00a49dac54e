"""``gpu-only``: every token's KV stays on the GPU while its request runs, as in an ordinary server.

A page takes one block that holds all layers. Full pages are cached by content and survive their request
until the block is needed; a preempted request computes its context again, less what is still cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from mypy_extensions import mypyc_attr

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.ledger import RequestLedger
from hisparsim.serving.plan import Allocate, IntArray
from hisparsim.serving.policy import (
    NO_HIT,
    Census,
    LateFree,
    PrefixHit,
    ResidencyPolicy,
)
from hisparsim.serving.request import Request

_NONE = np.empty(0, np.int64)


class GpuLedger(RequestLedger):
    """Block table of one request: ``blocks[:num_pages]``."""

    __slots__ = ("blocks", "num_cached")

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.blocks: IntArray = np.zeros(capacity, np.int64)
        self.num_cached = 0
        """Leading pages that carry their content key."""


@mypyc_attr(allow_interpreted_subclasses=True)
class GpuOnly(ResidencyPolicy):
    name = "gpu-only"
    summary = "all KV on the GPU, GPU prefix cache, preemption recomputes"
    ledger_class: ClassVar[type[GpuLedger]] = GpuLedger
    grows_quietly = True

    # -- queries ----------------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit:
        if not self.limits.prefix_caching or request.page_keys is None:
            return NO_HIT
        blocks = self.pool.find_prefix(request.keys((request.known - 1) // self.limits.page_tokens))
        if not blocks:
            return NO_HIT
        return PrefixHit(len(blocks) * self.limits.page_tokens, 0, (np.array(blocks, np.int64),))

    def admission_blocks(self, request: Request) -> tuple[int, int]:
        return self._known_pages(request), 0

    def census(self, running: Sequence[Request]) -> Census:
        pinned = self.pool.num_held
        return Census(free=self.pool.num_free, resident_pinned=pinned, num_full=len(running))

    def fits_alone(self, request: Request) -> str | None:
        return self._too_large(
            request, self._end_pages(request), "blocks at its end", self.pool, "kv.gpu_kv_gib"
        )

    # -- changes ----------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        limits, pool = self.limits, self.pool
        cached = hit.blocks[0] if hit.tokens else _NONE
        evictable = pool.num_free_among(cached) if len(cached) else 0
        if self._known_pages(request) - len(cached) + evictable + reserve > pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False  # the whole prompt is reserved for, not only its first chunk
        if hit.loaded_tokens:
            pages = limits.pages(hit.tokens + hit.loaded_tokens)
        else:
            pages = self._slots(hit.tokens + num_tokens)
        if pages - len(cached) + evictable + reserve > pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        ledger = self.ledger_class(self._capacity(request))
        request.ledger = ledger
        if len(cached):
            pool.touch(cached)
            ledger.blocks[: len(cached)] = cached
        ledger.num_pages = ledger.num_readable = ledger.num_cached = len(cached)
        self._allocate(request, ledger, pages)
        self._plan_seal(request, ledger.num_cached)
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        ledger = request.ledger
        assert isinstance(ledger, GpuLedger)
        pages = self._slots(request.computed + num_tokens)
        if pages - ledger.num_pages > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        self._allocate(request, ledger, pages)
        return True

    def _allocate(self, request: Request, ledger: GpuLedger, pages: int) -> None:
        first = ledger.num_pages
        if pages > first:
            blocks = self.pool.take(pages - first)
            if pages > len(ledger.blocks):
                ledger.blocks = np.concatenate([ledger.blocks, np.zeros(pages, np.int64)])
            ledger.blocks[first:pages] = blocks
            ledger.num_pages = ledger.num_readable = pages
            empty = np.empty((len(blocks), 0), np.int64)
            self.actions.append(Allocate(request.request_id, first, blocks, empty, _NONE))
        request.slot_tokens = ledger.num_pages * self.limits.page_tokens

    def seal(self, request: Request, num_tokens: int) -> None:
        ledger = request.ledger
        assert isinstance(ledger, GpuLedger)
        full = min(num_tokens // self.limits.page_tokens, ledger.num_pages)
        first = ledger.num_cached
        if full > first:
            assert request.page_keys is not None
            self.pool.cache(ledger.blocks[first:full], request.page_keys[first:full])
            ledger.num_cached = full
        self._plan_seal(request, ledger.num_cached)

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        ledger = request.ledger
        assert isinstance(ledger, GpuLedger)
        self.pool.release(ledger.blocks[: ledger.num_pages][::-1])  # tail first: prefixes live longest
        return None

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
        self.pool.check()
        held = np.zeros(self.pool.num_blocks, np.int64)
        for request in running:
            ledger = request.ledger
            assert isinstance(ledger, GpuLedger)
            if ledger.num_pages < self.limits.pages(request.computed):
                raise LawBroken(f"L3: {request!r} computed more than its {ledger.num_pages} pages hold")
            held[ledger.blocks[: ledger.num_pages]] += 1
        for blocks in self._held_elsewhere():
            held[blocks] += 1
        if np.any(held != self.pool.ref):
            block = int(np.nonzero(held != self.pool.ref)[0][0])
            raise LawBroken(f"L1: block {block} is in {held[block]} tables, counted {self.pool.ref[block]}")

    def _held_elsewhere(self) -> list[IntArray]:
        """Blocks held by something else than a running request."""
        return []
