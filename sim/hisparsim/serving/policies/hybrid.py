"""``hybrid``: vLLM 0.33's Hybrid HiSparse, GPU pages as an evictable write-back cache of the host tier.

Every page gets a host block when it is allocated. A page is *dirty* until its copy in the host is complete,
then *clean*; clean pages of a request that owns a hot buffer are *released*: still read but free to the pool,
and *lost* when the pool takes one of their blocks, after which the request reads them from the host through
its hot buffer. Requests ask for a hot buffer when the pool runs low, when they fill the window that admission
reserved for them, or when they resume a prefix that only the host holds whole.

Behaviour that users call flaws is kept, each as a switch that is on by default (docs/conformance.md):
``wait_for_write_back`` (a failed allocation waits while a write-back is in flight instead of preempting),
``transition_on_watermark`` (requests go hot because the pool is low, whether they need to or not) and
``lease_next_step`` (a hot buffer asked for in one pass is granted in the next). ``eager_host_mirror`` copies
decoded rows to the host in the step that computes them, so that a page's write-back moves no bytes;
``indexer_offload`` loads indexer pages that the GPU has lost where the host tier still holds the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.blocks import BlockPool, LawBroken
from hisparsim.serving.frames import NO_FRAME, PageFrames
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import (
    Adopt,
    Allocate,
    IntArray,
    LeaseHot,
    Load,
    Lose,
    Release,
    Restore,
    TransferPhase,
    TransferUpdate,
    WriteBack,
)
from hisparsim.serving.policy import (
    NO_HIT,
    Census,
    LateFree,
    PolicyError,
    PrefixHit,
    RequestLedger,
    ResidencyPolicy,
    key_array,
)
from hisparsim.serving.request import NEVER, Request

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
        self.index: IntArray = np.zeros(capacity, np.int32)
        self.host: IntArray = np.zeros(capacity, np.int32)
        self.frames: IntArray = np.full(capacity, NO_FRAME, np.int32)
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
            self.index = np.concatenate([self.index, np.zeros(extra, np.int32)])
            self.host = np.concatenate([self.host, np.zeros(extra, np.int32)])
            self.frames = np.concatenate([self.frames, np.full(extra, NO_FRAME, np.int32)])
            self.host_valid = np.concatenate([self.host_valid, np.zeros(extra, np.bool_)])
            more = np.zeros(extra, np.bool_)
            self.released = np.concatenate([self.released, more])
            self.clean_pinned = np.concatenate([self.clean_pinned, more])
            self.writing = np.concatenate([self.writing, more])


class _Transfer:
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


class Hybrid(ResidencyPolicy):
    name = "hybrid"
    summary = "vLLM 0.33 HiSparse: GPU pages are an evictable write-back cache of the host tier (default)"
    uses_groups = True
    options: ClassVar[Mapping[str, Any]] = {
        "wait_for_write_back": True,
        "transition_on_watermark": True,
        "lease_next_step": True,
        "eager_host_mirror": True,
        "indexer_offload": False,
    }

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        if limits.num_groups < 1 or limits.hot_pages < 1 or limits.num_host_blocks < 2:
            raise PolicyError(f"policy {self.name} needs layer groups, a hot buffer and a host pool")
        self.defers_frees = limits.async_depth > 1
        self.mirrors_decode = bool(self.option_values["eager_host_mirror"])
        self.mirrors_prefill = True
        self.host = BlockPool(limits.num_host_blocks, "host pool")
        self.frames = PageFrames(self.pool, limits.num_groups, self._lose)
        self._ledgers: dict[int, HybridLedger] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._detached: dict[HybridLedger, IntArray] = {}
        self._next_transfer = 0
        self._write_back_budget = max(limits.max_model_len // limits.page_tokens, 1)
        self._lost: dict[int, list[IntArray]] = {}
        self._pages_lost = 0
        self._pages_adopted = 0
        self._num_hot = 0
        self._num_adopting = 0
        self._restores_to_send = 0
        self._low_water = limits.transition_watermark if self.option_values["transition_on_watermark"] else 0

    # -- queries ----------------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit:
        """A prefix counts as far as both the host tier and the GPU's indexer pages still hold it.

        With speculation its last page is computed again: the drafter needs the hidden states there. With
        ``indexer_offload`` the indexer pages of what else the host tier holds are loaded.
        """
        if not self.limits.prefix_caching or request.page_keys is None:
            return NO_HIT
        drafting = self.limits.draft_tokens > 0
        keys = request.keys((request.known - (not drafting)) // self.limits.page_tokens)
        host = self.host.find_prefix(keys)
        index = self.pool.find_prefix(keys[: len(host)])
        pages = total = max(len(index) - drafting, 0)
        if self.option_values["indexer_offload"]:
            total = max(pages, min(len(host), (request.known - 1) // self.limits.page_tokens))
        if not total:
            return NO_HIT
        blocks = (np.array(host[:total], np.int32), np.array(index[:pages], np.int32))
        page_tokens = self.limits.page_tokens
        return PrefixHit(pages * page_tokens, (total - pages) * page_tokens, blocks)

    def may_wait(self) -> bool:
        """Waiting helps while a write-back is in flight whose completion can free something."""
        if not self.option_values["wait_for_write_back"]:
            return False
        for transfer in self._transfers.values():
            ledger = transfer.ledger
            if ledger.hot is not None and self._ledgers.get(ledger.request_id) is ledger:
                return True
            if np.any(self.host.ref[transfer.host_blocks] == 1):
                return True
        return False

    def quiet_until(self, request: Request) -> int:
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        next_write_back = (ledger.planned + 1) * self.limits.page_tokens
        return min(super().quiet_until(request), next_write_back + self.limits.async_depth - 2)

    def looks_at_all(self) -> bool:
        """When the pool is low, every request that cannot read from the host is asked to."""
        if self._num_hot == len(self._ledgers):
            return False
        return self.pool.num_free < self._low_water or self._num_adopting > 0

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """More than the pool has where the host pool cannot hold the pages."""
        ledger, limits = request.ledger, self.limits
        assert isinstance(ledger, HybridLedger)
        pages, held = limits.pages(num_tokens), ledger.num_pages
        if pages - held > self.host.num_free:
            return self.pool.num_blocks + 1
        resident = limits.num_groups * max(min(pages, limits.admission_cap_pages) - held, 0)
        return max(pages - held, 0) + resident + (limits.hot_blocks if ledger.wants_more else 0)

    def draft_blocks(self) -> int:
        return super().draft_blocks() * 2 * (1 + self.limits.num_groups)

    def admission_blocks(self, request: Request) -> tuple[int, int]:
        limits = self.limits
        prompt = limits.pages(min(request.known, limits.max_model_len))
        return prompt + limits.num_groups * min(prompt, limits.admission_cap_pages), prompt

    def lacks(self, request: Request) -> str | None:
        if self.admission_blocks(request)[1] > self.host.num_free:
            return "host_blocks"
        return super().lacks(request)

    def fits_alone(self, request: Request) -> str | None:
        limits = self.limits
        pages = limits.pages(min(request.end_tokens, limits.max_model_len))
        if pages > self.host.num_usable:
            return (
                f"request {request.request_id} needs {pages:,} host blocks at its end, the host pool has "
                f"{self.host.num_usable:,} (kv.host_pool_gib)"
            )
        prompt = limits.pages(min(request.known, limits.max_model_len))
        if not self.option_values["transition_on_watermark"]:
            prompt = pages  # nothing but a full window lets it read from the host
        window = limits.num_groups * min(prompt, limits.admission_cap_pages)
        steady = pages + limits.hot_blocks + KEPT_TAIL_PAGES * limits.num_groups
        needed = max(prompt + window, steady)
        if needed > self.pool.num_usable:
            return (
                f"request {request.request_id} needs {needed:,} blocks to be admitted and to finish, the GPU "
                f"pool has {self.pool.num_usable:,} (kv.gpu_kv_gib, kv.hot_rows)"
            )
        return None

    def census(self, running: Sequence[Request]) -> Census:
        counts = Census(free=self.pool.num_free, host_used=self.host.num_held)
        for request in running:
            ledger = request.ledger
            assert isinstance(ledger, HybridLedger)
            counts.index += ledger.num_pages
            if ledger.hot is not None:
                counts.num_hot += 1
            if ledger.num_readable == ledger.num_pages:
                counts.num_full += 1
            elif ledger.num_readable <= 2:
                counts.num_none += 1
            else:
                counts.num_mixed += 1
        counts.hot = counts.num_hot * self.limits.hot_blocks
        loading = len(self._ledgers) - len(running)  # each holds its last page besides
        counts.resident_pinned = self.frames.num_pinned_blocks() - loading * self.limits.num_groups
        counts.resident_released = self.frames.num_released_blocks()
        counts.orphans = self.pool.num_held - counts.index - counts.hot - counts.resident_pinned
        counts.watched_free = self.pool.num_watched_free
        counts.pending_transfers = sum(len(transfer.frames) for transfer in self._transfers.values())
        counts.pages_lost = self._pages_lost
        counts.pages_adopted = self._pages_adopted
        return counts

    # -- changes: memory --------------------------------------------------------------------------

    def begin_step(self) -> None:
        super().begin_step()
        self._pages_lost = 0

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        """Reserve for the whole prompt, its resident pages capped at the in-flight window."""
        limits = self.limits
        held = hit.tokens // limits.page_tokens
        prompt = limits.pages(min(request.known, limits.max_model_len))
        window = max(min(prompt, limits.admission_cap_pages) - held, 0)
        pages = self._slots(hit.tokens + num_tokens)
        if not self._fits(hit, prompt, window, reserve) or not self._fits(hit, pages, pages - held, reserve):
            return False
        self._hold_hit(request, hit)
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        self._allocate(request, ledger, pages)
        self._plan_seal(request, ledger)
        return True

    def admit_loading(self, request: Request, hit: PrefixHit, *, reserve: int, promised: int) -> bool:
        """Reserve for the whole prompt, uncapped; of the loaded pages only the last one is resident."""
        limits = self.limits
        first = hit.tokens // limits.page_tokens
        held = len(hit.blocks[0])
        prompt = limits.pages(min(request.known, limits.max_model_len))
        if not self._fits(hit, prompt, prompt - held + 1, reserve) or not self._fits(
            hit, held, 1, reserve + promised
        ):
            return False
        self._hold_hit(request, hit)
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        ledger.index[first:held] = self.pool.take(held - first)
        ledger.frames[held - 1 : held] = self.frames.allocate(1)
        ledger.num_pages = held
        ledger.num_readable = 1
        resident = np.zeros((held - first, limits.num_groups), np.int32)
        resident[-1] = self.frames.blocks[ledger.frames[held - 1]]
        index, host = ledger.index[first:held].copy(), ledger.host[first:held].copy()
        self.actions.append(Allocate(request.request_id, first, index, resident, host))
        self._allocate(request, ledger, held)  # the hot buffer
        num_bytes = len(index) * limits.block_bytes
        transfer_id, keys = self._new_transfer_id(), self.host.key[host]
        self.actions.append(Load(transfer_id, request.request_id, len(index), num_bytes, keys, index))
        self._plan_seal(request, ledger)
        return True

    def _fits(self, hit: PrefixHit, pages: int, resident: int, reserve: int) -> bool:
        """Whether a waiting request's hit, ``pages`` in all and so many resident ones can be had."""
        held = index_held = host_again = index_again = hot = 0
        if hit.blocks:
            held, index_held = len(hit.blocks[0]), len(hit.blocks[1])
            host_again = self.host.num_free_among(hit.blocks[0])
            index_again = self.pool.num_free_among(hit.blocks[1])
            hot = self.limits.hot_blocks
        if pages - held + host_again > self.host.num_free:
            self.blocked_by = "host_blocks"
            return False
        needed = pages - index_held + index_again + self.limits.num_groups * resident + hot
        if needed + reserve > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        return True

    def _hold_hit(self, request: Request, hit: PrefixHit) -> None:
        """Open the request's ledger with what was found of its prefix."""
        limits = self.limits
        ledger = HybridLedger(request, limits.pages(min(request.end_tokens + 1, limits.max_model_len)) + 2)
        request.ledger = ledger
        self._ledgers[request.request_id] = ledger
        if not hit.blocks:
            return
        host_blocks, index_blocks = hit.blocks
        held, pages = len(host_blocks), len(index_blocks)
        self.host.touch(host_blocks)
        self.pool.touch(index_blocks)
        ledger.host[:held] = host_blocks
        ledger.index[:pages] = index_blocks
        ledger.num_pages = ledger.cached_index = ledger.adopt_pages = pages
        ledger.host_valid[:held] = True
        ledger.cached_host = ledger.ready_pages = ledger.planned = ledger.copies_recorded = held
        ledger.wants_more = True
        self._num_adopting += pages > 0

    def extend(self, request: Request, num_tokens: int) -> bool:
        ledger, limits = request.ledger, self.limits
        assert isinstance(ledger, HybridLedger)
        pages = self._slots(request.computed + num_tokens)
        new = max(pages - ledger.num_pages, 0)
        if new > self.host.num_free:
            self.blocked_by = "host_blocks"
            return False
        lease = limits.hot_blocks if ledger.wants_more else 0
        if new * (1 + limits.num_groups) + lease > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        self._allocate(request, ledger, pages)
        return True

    def _slots(self, num_tokens: int) -> int:
        limits = self.limits
        return limits.pages(min(num_tokens + limits.draft_tokens, limits.max_model_len))

    def _allocate(self, request: Request, ledger: HybridLedger, pages: int) -> None:
        """Host, indexer, resident and hot blocks, in this order."""
        first, limits = ledger.num_pages, self.limits
        if pages > first:
            ledger.grow(pages)
            count = pages - first
            ledger.host[first:pages] = self.host.take(count)
            ledger.index[first:pages] = self.pool.take(count)
            frames = self.frames.allocate(count)
            ledger.frames[first:pages] = frames
            ledger.num_pages = pages
            ledger.num_readable += count
            self.actions.append(
                Allocate(
                    request.request_id,
                    first,
                    ledger.index[first:pages].copy(),
                    self.frames.blocks[frames],
                    ledger.host[first:pages].copy(),
                )
            )
        if ledger.wants_more:
            self._lease(ledger)
        request.slot_tokens = ledger.num_pages * limits.page_tokens
        self._tell_lost()

    def _lease(self, ledger: HybridLedger) -> None:
        limits = self.limits
        ledger.wants_more = False
        self._num_hot += 1
        ledger.hot = self.pool.take(limits.hot_blocks).reshape(limits.num_groups, limits.hot_pages)
        self.actions.append(LeaseHot(ledger.request_id, ledger.hot))

    def _lose(self, request_ids: NDArray[np.int64], pages: IntArray) -> None:
        """The pool took a block of released pages."""
        self._pages_lost += len(pages)
        for request_id in np.unique(request_ids).tolist():
            ledger = self._ledgers[request_id]
            own = pages[request_ids == request_id]
            ledger.frames[own] = NO_FRAME
            ledger.released[own] = False
            ledger.num_readable -= len(own)
            self._lost.setdefault(request_id, []).append(own)

    def _tell_lost(self) -> None:
        for request_id, pages in self._lost.items():
            self.actions.append(Lose(request_id, np.concatenate(pages)))
        self._lost.clear()

    # -- changes: content -------------------------------------------------------------------------

    def seal(self, request: Request, num_tokens: int) -> None:
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        full = min(num_tokens // self.limits.page_tokens, ledger.num_pages)
        if full > ledger.cached_index:
            ledger.publish_pages = full
            self._publish(ledger)
            first = ledger.cached_index
            self.pool.cache(ledger.index[first:full], key_array(request.keys(full)[first:]))
            ledger.cached_index = full
        self._plan_seal(request, ledger)

    def _plan_seal(self, request: Request, ledger: HybridLedger) -> None:
        cacheable = self.limits.prefix_caching and ledger.keys is not None
        if cacheable and ledger.cached_index < len(ledger.keys):  # type: ignore[arg-type]
            request.next_seal = (ledger.cached_index + 1) * self.limits.page_tokens
        else:
            request.next_seal = NEVER

    def _publish(self, ledger: HybridLedger) -> None:
        """Make the durable part of the full prefix findable in the host tier, and its GPU copies with it."""
        if ledger.publish_pages is None:
            return
        ready = min(ledger.publish_pages, ledger.ready_pages)
        first = ledger.cached_host
        if ready > first:
            assert ledger.keys is not None
            self.host.cache(ledger.host[first:ready], ledger.keys[first:ready])
            ledger.cached_host = ready
        first = ledger.copies_recorded
        if ready > first:
            frames = ledger.frames[first:ready]
            readable = (frames != NO_FRAME) & ~ledger.writing[first:ready]
            keys = self.host.key[ledger.host[first:ready]]
            self.frames.record_copies(frames[readable], keys[readable])
            ledger.copies_recorded = ready
        if ledger.ready_pages >= ledger.publish_pages:
            ledger.publish_pages = None

    # -- changes: residency after scheduling ------------------------------------------------------

    def end_step(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        limits = self.limits
        budget = max(self._write_back_budget - self._restores_to_send, 0)
        self._restores_to_send = 0
        window = limits.admission_cap_pages
        page_tokens = limits.page_tokens
        leases_at_once = not self.option_values["lease_next_step"]
        for request, tokens in scheduled:
            ledger = request.ledger
            assert isinstance(ledger, HybridLedger)
            sealed = tokens // page_tokens
            if sealed > ledger.planned:
                budget -= self._write_back(ledger, min(sealed, ledger.planned + budget))
            if ledger.adopt_pages:
                self._adopt(ledger)
            if ledger.hot is None and (self.pool.num_free < self._low_water or ledger.num_pages >= window):
                ledger.wants_more = True
                if leases_at_once and self.pool.num_free >= limits.hot_blocks:
                    self._lease(ledger)
                else:
                    request.wake = 0
            if ledger.hot is not None and ledger.num_clean_pinned:
                self._release_clean(ledger)
        self._tell_lost()

    def _write_back(self, ledger: HybridLedger, sealed: int) -> int:
        """Start the copy of every sealed page that has none; returns how many."""
        first = ledger.planned
        if sealed <= first:
            return 0
        transfer_id, transfer = self._start_transfer(ledger, first, sealed, restores=False)
        ledger.planned = sealed
        num_bytes = 0 if self.mirrors_decode else (sealed - first) * self.limits.host_block_bytes
        self.actions.append(
            WriteBack(
                transfer_id,
                ledger.request_id,
                first,
                transfer.host_blocks,
                self.frames.blocks[transfer.frames],
                num_bytes,
            )
        )
        return sealed - first

    def _start_transfer(
        self, ledger: HybridLedger, first: int, end: int, *, restores: bool
    ) -> tuple[int, _Transfer]:
        transfer = _Transfer(ledger, first, end, ledger.frames[first:end].copy(), restores=restores)
        self.host.ref[transfer.host_blocks] += 1  # held already, so never in the free queue
        self.frames.pin(transfer.frames)
        ledger.writing[first:end] = True
        ledger.num_writing += end - first
        transfer_id = self._new_transfer_id()
        self._transfers[transfer_id] = transfer
        return transfer_id, transfer

    def _new_transfer_id(self) -> int:
        self._next_transfer += 1
        return self._next_transfer - 1

    def _adopt(self, ledger: HybridLedger) -> None:
        """Read prefix pages again where the GPU still holds a copy; hits may be scattered."""
        pages: list[int] = []
        frames: list[int] = []
        keys = self.host.key[ledger.host[: ledger.adopt_pages]].tolist()
        for page, key in enumerate(keys):
            frame = self.frames.copies.get(key)
            if frame is not None and ledger.frames[page] == NO_FRAME:
                pages.append(page)
                frames.append(frame)
        ledger.adopt_pages = 0
        self._num_adopting -= 1
        if not pages:
            return
        frame_array = np.array(frames, np.int32)
        page_array = np.array(pages, np.int32)
        self.frames.pin(frame_array)
        self.frames.readers[frame_array] += 1
        ledger.frames[page_array] = frame_array
        ledger.num_readable += len(pages)
        ledger.clean_pinned[page_array] = True
        ledger.num_clean_pinned += len(pages)
        self._pages_adopted += len(pages)
        self.actions.append(Adopt(ledger.request_id, page_array, self.frames.blocks[frame_array]))

    def _release_clean(self, ledger: HybridLedger) -> None:
        """Give clean pages to the pool, tail first, so that a prefix loses its tail before its head."""
        end = ledger.num_pages - KEPT_TAIL_PAGES
        pages = np.nonzero(ledger.clean_pinned[: max(end, 0)])[0].astype(np.int32)[::-1]
        if len(pages):
            self.frames.unpin(self._release(ledger, pages))

    def _release(self, ledger: HybridLedger, pages: IntArray) -> IntArray:
        """Note that pages are read without being held; the caller unpins the frames that are returned."""
        frames = ledger.frames[pages]
        self.frames.read_loose(frames, ledger.request_id, pages)
        ledger.released[pages] = True
        ledger.clean_pinned[pages] = False
        ledger.num_clean_pinned -= len(pages)
        self.actions.append(Release(ledger.request_id, pages))
        return frames

    # -- changes: transfers -----------------------------------------------------------------------

    def loaded(self, request: Request) -> None:
        """The last page comes back to the GPU too: the request's next tokens may be written there."""
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        last = ledger.num_pages - 1
        transfer_id, transfer = self._start_transfer(ledger, last, last + 1, restores=True)
        self._restores_to_send += 1
        self.actions.append(
            Restore(
                transfer_id,
                request.request_id,
                last,
                int(transfer.host_blocks[0]),
                self.frames.blocks[transfer.frames[0]],
                self.limits.host_block_bytes,
            )
        )

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        for update in updates:
            transfer = self._transfers.get(update.transfer_id)
            if transfer is None:
                continue
            if update.phase is TransferPhase.ENQUEUED:
                transfer.enqueued = True
            else:
                transfer.done = True
        finished: list[_Transfer] = []
        for transfer_id in sorted({update.transfer_id for update in updates}):
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.enqueued and transfer.done:
                finished.append(self._transfers.pop(transfer_id))
        if not finished:
            return
        self._drop_transfer_pins(np.concatenate([transfer.frames for transfer in finished]))
        unpinned: list[IntArray] = []
        current: dict[int, HybridLedger] = {}
        for transfer in finished:
            ledger, first, end = transfer.ledger, transfer.first, transfer.end
            ledger.writing[first:end] = False
            ledger.num_writing -= end - first
            ledger.host_valid[first:end] = True
            if self._ledgers.get(ledger.request_id) is ledger:
                current[ledger.request_id] = ledger
                ledger.clean_pinned[first:end] = True
                ledger.num_clean_pinned += end - first
                if transfer.restores:
                    self.frames.record_copies(transfer.frames, self.host.key[transfer.host_blocks])
                self.host.ref[transfer.host_blocks] -= 1  # its request holds them still
                if ledger.hot is not None:
                    end = min(end, ledger.num_pages - KEPT_TAIL_PAGES)
                    if end > first:
                        unpinned.append(self._release(ledger, np.arange(first, end, dtype=np.int32)))
            else:
                self._finish_detached(transfer)
        if unpinned:
            self.frames.unpin(np.concatenate(unpinned))
        for ledger in current.values():
            self._count_ready(ledger)
            self._publish(ledger)

    @staticmethod
    def _count_ready(ledger: HybridLedger) -> None:
        lacking = np.nonzero(~ledger.host_valid[ledger.ready_pages : ledger.num_pages])[0]
        ledger.ready_pages = ledger.ready_pages + int(lacking[0]) if len(lacking) else ledger.num_pages

    def _drop_transfer_pins(self, frames: IntArray) -> None:
        last = self.frames.ref[frames] == 1
        if np.any(last):  # pages of requests that left meanwhile
            self.frames.release(frames[last], group_major=False)
        self.frames.drop_shared_pin(frames[~last])

    def _finish_detached(self, transfer: _Transfer) -> None:
        """A write-back of a request that left: its prefix becomes findable once the last one is durable."""
        ledger = transfer.ledger
        if ledger.num_writing or ledger not in self._detached:
            self.host.release_one_by_one(transfer.host_blocks)
            return
        self.host.release_one_by_one(transfer.host_blocks[:-1])
        blocks = self._detached.pop(ledger)
        self._count_ready(ledger)
        first, ready = ledger.cached_host, min(ledger.ready_pages, len(blocks))
        if ready > first:
            assert ledger.keys is not None
            self.host.cache(blocks[first:ready], ledger.keys[first:ready])
        self.host.release(blocks[::-1])
        self.host.release(transfer.host_blocks[-1:])

    # -- changes: leaving -------------------------------------------------------------------------

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        """Clean pages stay in the pool as copies; dirty ones are dropped, unless a write-back holds them."""
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        del self._ledgers[request.request_id]
        self._num_hot -= ledger.hot is not None
        self._num_adopting -= ledger.adopt_pages > 0
        if finished and ledger.publish_pages is not None and ledger.num_writing:
            self._detached[ledger] = ledger.host[: ledger.publish_pages].copy()
            self.host.touch(self._detached[ledger])
        else:
            ledger.publish_pages = None  # a preempted step may not have computed what it was to copy
        pages = np.nonzero(ledger.frames[: ledger.num_pages] != NO_FRAME)[0].astype(np.int32)[::-1]
        frames = ledger.frames[pages]
        loose = ledger.released[pages]
        clean = ~loose & ledger.host_valid[pages] & ~ledger.writing[pages]
        self.frames.unpin(frames[clean], group_major=True)
        self.frames.stop_reading(frames, ledger.request_id, pages)
        self.frames.retire_dead(frames[clean])
        dirty = frames[~loose & ~clean]
        num_pages = ledger.num_pages

        def free() -> None:
            self.host.release(ledger.host[:num_pages][::-1])
            self.pool.release(ledger.index[:num_pages][::-1])
            self.frames.release(dirty, group_major=True)
            if ledger.hot is not None:
                self.pool.release(ledger.hot[:, ::-1][::-1].ravel())

        if in_flight:
            return free
        free()
        return None

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
        limits = self.limits
        self.pool.check()
        self.host.check()
        self.frames.check()
        readers = np.zeros_like(self.frames.readers)
        alive = {request.request_id for request in running}
        for request_id, waiting in self._ledgers.items():
            if request_id not in alive:
                frames = waiting.frames[: waiting.num_pages]
                np.add.at(readers, frames[frames != NO_FRAME], 1)
        for request in running:
            ledger = request.ledger
            assert isinstance(ledger, HybridLedger)
            count = ledger.num_pages
            frames = ledger.frames[:count]
            readable = frames != NO_FRAME
            np.add.at(readers, frames[readable], 1)
            if int(np.count_nonzero(readable)) != ledger.num_readable:
                raise LawBroken(f"{request!r}: {ledger.num_readable} readable pages counted")
            if count < limits.pages(request.computed):
                raise LawBroken(f"L3: {request!r} computed more than its {count} pages hold")
            unreadable = ~readable & ~ledger.host_valid[:count]
            if np.any(unreadable):
                raise LawBroken(f"L3: {request!r} page {int(np.argmax(unreadable))} is nowhere readable")
            if ledger.num_readable < count and ledger.hot is None:
                raise LawBroken(f"L5: {request!r} is not fully on the GPU and owns no hot buffer")
            if np.any(ledger.released[:count] & ~ledger.host_valid[:count]):
                raise LawBroken(f"L4: {request!r} released a page whose host copy is not durable")
        if np.any(readers != self.frames.readers):
            raise LawBroken("L1: page tables and the frames' readers disagree")
