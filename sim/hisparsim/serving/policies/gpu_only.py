"""``gpu-only``: every token's KV stays on the GPU while its request runs, as in an ordinary server.

A page takes one block that holds all layers. Full pages are cached by content and survive their request
until the block is needed; a preempted request computes its context again, less what is still cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.plan import Allocate, IntArray
from hisparsim.serving.policy import (
    NO_HIT,
    Census,
    LateFree,
    PrefixHit,
    RequestLedger,
    ResidencyPolicy,
    key_array,
)
from hisparsim.serving.request import NEVER, Request

_NONE = np.empty(0, np.int32)


class GpuLedger(RequestLedger):
    """Block table of one request: ``blocks[:num_pages]``."""

    __slots__ = ("blocks", "num_cached")

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.blocks: IntArray = np.zeros(capacity, np.int32)
        self.num_cached = 0
        """Leading pages that carry their content key."""


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
        return PrefixHit(len(blocks) * self.limits.page_tokens, 0, (np.array(blocks, np.int32),))

    def admission_blocks(self, request: Request) -> tuple[int, int]:
        return self.limits.pages(min(request.known, self.limits.max_model_len)), 0

    def fits_alone(self, request: Request) -> str | None:
        needed = self.limits.pages(min(request.end_tokens, self.limits.max_model_len))
        if needed <= self.pool.num_usable:
            return None
        return (
            f"request {request.request_id} needs {needed:,} blocks at its end, the GPU pool has "
            f"{self.pool.num_usable:,} (kv.gpu_kv_gib)"
        )

    def census(self, running: Sequence[Request]) -> Census:
        pinned = self.pool.num_held
        return Census(free=self.pool.num_free, resident_pinned=pinned, num_full=len(running))

    # -- changes ----------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        limits, pool = self.limits, self.pool
        cached = hit.blocks[0] if hit.tokens else _NONE
        evictable = pool.num_free_among(cached) if len(cached) else 0
        prompt_pages = limits.pages(min(request.known, limits.max_model_len))
        if prompt_pages - len(cached) + evictable + reserve > pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False  # the whole prompt is reserved for, not only its first chunk
        if hit.loaded_tokens:
            pages = limits.pages(hit.tokens + hit.loaded_tokens)
        else:
            pages = self._slots(hit.tokens + num_tokens)
        if pages - len(cached) + evictable + reserve > pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        capacity = limits.pages(min(request.end_tokens + 1, limits.max_model_len)) + 2
        ledger = self.ledger_class(capacity)
        request.ledger = ledger
        if len(cached):
            pool.touch(cached)
            ledger.blocks[: len(cached)] = cached
        ledger.num_pages = ledger.num_readable = ledger.num_cached = len(cached)
        self._allocate(request, ledger, pages)
        self._plan_seal(request, ledger)
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

    def _slots(self, num_tokens: int) -> int:
        limits = self.limits
        return limits.pages(min(num_tokens + limits.draft_tokens, limits.max_model_len))

    def _allocate(self, request: Request, ledger: GpuLedger, pages: int) -> None:
        first = ledger.num_pages
        if pages > first:
            blocks = self.pool.take(pages - first)
            if pages > len(ledger.blocks):
                ledger.blocks = np.concatenate([ledger.blocks, np.zeros(pages, np.int32)])
            ledger.blocks[first:pages] = blocks
            ledger.num_pages = ledger.num_readable = pages
            empty = np.empty((len(blocks), 0), np.int32)
            self.actions.append(Allocate(request.request_id, first, blocks, empty, _NONE))
        request.slot_tokens = ledger.num_pages * self.limits.page_tokens

    def seal(self, request: Request, num_tokens: int) -> None:
        ledger = request.ledger
        assert isinstance(ledger, GpuLedger)
        full = min(num_tokens // self.limits.page_tokens, ledger.num_pages)
        first = ledger.num_cached
        if full > first:
            self.pool.cache(ledger.blocks[first:full], key_array(request.keys(full)[first:]))
            ledger.num_cached = full
        self._plan_seal(request, ledger)

    def _plan_seal(self, request: Request, ledger: GpuLedger) -> None:
        cacheable = self.limits.prefix_caching and request.page_keys is not None
        if cacheable and ledger.num_cached < len(request.page_keys):  # type: ignore[arg-type]
            request.next_seal = (ledger.num_cached + 1) * self.limits.page_tokens
        else:
            request.next_seal = NEVER

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        ledger = request.ledger
        assert isinstance(ledger, GpuLedger)
        self.pool.release(ledger.blocks[: ledger.num_pages][::-1])  # tail first: prefixes live longest
        return None

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
        self.pool.check()
        held = np.zeros(self.pool.num_blocks, np.int32)
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
