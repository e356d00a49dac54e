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
from mypy_extensions import mypyc_attr

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.frames import NO_FRAME
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Allocate, LeaseHot, Load, TransferUpdate
from hisparsim.serving.policies.host_backed import HostBacked
from hisparsim.serving.policies.hybrid_ledger import KEPT_TAIL_PAGES, HybridLedger
from hisparsim.serving.policies.hybrid_resident import ResidentPages
from hisparsim.serving.policies.hybrid_tier import HostTier
from hisparsim.serving.policy import NO_HIT, Census, LateFree, PrefixHit
from hisparsim.serving.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class Hybrid(HostBacked):
    name = "hybrid"
    summary = "vLLM 0.33 HiSparse: GPU pages are an evictable write-back cache of the host tier (default)"
    options: ClassVar[Mapping[str, Any]] = {
        "wait_for_write_back": True,
        "transition_on_watermark": True,
        "lease_next_step": True,
        "eager_host_mirror": True,
        "indexer_offload": False,
    }

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self.defers_frees = limits.async_depth > 1
        self.mirrors_decode = bool(self.option_values["eager_host_mirror"])
        self.mirrors_prefill = True
        self._ledgers: dict[int, HybridLedger] = {}
        self._resident = ResidentPages(self.pool, limits.num_groups, self.host, self._ledgers, self.actions)
        self._tier = HostTier(
            self.host,
            self._resident,
            self._ledgers,
            self.actions,
            page_bytes=limits.host_block_bytes,
            mirrored=self.mirrors_decode,
        )
        self.frames = self._resident.frames
        self._write_back_budget = max(limits.max_model_len // limits.page_tokens, 1)
        self._num_hot = 0
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
        blocks = (np.array(host[:total], np.int64), np.array(index[:pages], np.int64))
        page_tokens = self.limits.page_tokens
        return PrefixHit(pages * page_tokens, (total - pages) * page_tokens, blocks)

    def admission_blocks(self, request: Request) -> tuple[int, int]:
        limits = self.limits
        prompt = self._known_pages(request)
        return prompt + limits.num_groups * min(prompt, limits.admission_cap_pages), prompt

    def may_wait(self) -> bool:
        """Waiting helps while a write-back is in flight whose completion can free something."""
        return bool(self.option_values["wait_for_write_back"]) and self._tier.will_free()

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

    def quiet_until(self, request: Request) -> int:
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        next_write_back = (ledger.planned + 1) * self.limits.page_tokens
        return min(super().quiet_until(request), next_write_back + self.limits.async_depth - 2)

    def looks_at_all(self) -> bool:
        """When the pool is low, every request that cannot read from the host is asked to."""
        if self._num_hot == len(self._ledgers):
            return False
        return self.pool.num_free < self._low_water or self._resident.num_adopting > 0

    def census(self, running: Sequence[Request]) -> Census:
        counts = Census(free=self.pool.num_free, host_used=self.host.num_held)
        index = num_hot = num_full = num_none = 0
        ledgers: list[HybridLedger] = [request.ledger for request in running]  # type: ignore[misc]
        for ledger in ledgers:
            pages, readable = ledger.num_pages, ledger.num_readable
            index += pages
            if ledger.hot is not None:
                num_hot += 1
            if readable == pages:
                num_full += 1
            elif readable <= 2:
                num_none += 1
        counts.index, counts.num_hot, counts.num_full, counts.num_none = index, num_hot, num_full, num_none
        counts.num_mixed = len(running) - num_full - num_none
        counts.hot = counts.num_hot * self.limits.hot_blocks
        loading = len(self._ledgers) - len(running)  # each holds its last page besides
        held, counts.resident_released = self.frames.num_read_blocks()
        counts.resident_pinned = held - loading * self.limits.num_groups
        counts.orphans = self.pool.num_held - counts.index - counts.hot - counts.resident_pinned
        counts.watched_free = self.pool.num_watched_free
        counts.pending_transfers = self._tier.num_pages_moving()
        counts.pages_lost = self._resident.num_lost
        counts.pages_adopted = self._resident.num_adopted
        return counts

    def fits_alone(self, request: Request) -> str | None:
        limits = self.limits
        pages = self._end_pages(request)
        prompt = self._known_pages(request)
        if not self.option_values["transition_on_watermark"]:
            prompt = pages  # nothing but a full window lets it read from the host
        window = limits.num_groups * min(prompt, limits.admission_cap_pages)
        steady = pages + limits.hot_blocks + KEPT_TAIL_PAGES * limits.num_groups
        needed, wants = max(prompt + window, steady), "blocks to be admitted and to finish"
        return super().fits_alone(request) or self._too_large(
            request, needed, wants, self.pool, "kv.gpu_kv_gib, kv.hot_rows"
        )

    # -- changes ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        super().begin_step()
        self._resident.num_lost = 0

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        """Reserve for the whole prompt, its resident pages capped at the in-flight window."""
        limits = self.limits
        held = hit.tokens // limits.page_tokens
        prompt = self._known_pages(request)
        window = max(min(prompt, limits.admission_cap_pages) - held, 0)
        pages = self._slots(hit.tokens + num_tokens)
        if not self._fits(hit, prompt, window, reserve) or not self._fits(hit, pages, pages - held, reserve):
            return False
        self._hold_hit(request, hit)
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        self._allocate(request, ledger, pages)
        self._plan_seal(request, ledger.cached_index)
        return True

    def admit_loading(self, request: Request, hit: PrefixHit, *, reserve: int, promised: int) -> bool:
        """Reserve for the whole prompt, uncapped; of the loaded pages only the last one is resident."""
        limits = self.limits
        first = hit.tokens // limits.page_tokens
        held = len(hit.blocks[0])
        prompt = self._known_pages(request)
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
        resident = np.zeros((held - first, limits.num_groups), np.int64)
        resident[-1] = self.frames.blocks[ledger.frames[held - 1]]
        index, host = ledger.index[first:held].copy(), ledger.host[first:held].copy()
        self.actions.append(Allocate(request.request_id, first, index, resident, host))
        self._allocate(request, ledger, held)  # the hot buffer
        num_bytes = len(index) * limits.block_bytes
        transfer_id, keys = self._tier.new_transfer_id(), self.host.key[host]
        self.actions.append(Load(transfer_id, request.request_id, len(index), num_bytes, keys, index))
        self._plan_seal(request, ledger.cached_index)
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
        ledger = HybridLedger(request, self._capacity(request))
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
        self._resident.num_adopting += pages > 0

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
        self._resident.tell_lost()

    def _lease(self, ledger: HybridLedger) -> None:
        limits = self.limits
        ledger.wants_more = False
        self._num_hot += 1
        ledger.hot = self.pool.take(limits.hot_blocks).reshape(limits.num_groups, limits.hot_pages)
        self.actions.append(LeaseHot(ledger.request_id, ledger.hot))

    def seal(self, request: Request, num_tokens: int) -> None:
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        full = min(num_tokens // self.limits.page_tokens, ledger.num_pages)
        if full > ledger.cached_index:
            ledger.publish_pages = full
            self._tier.publish(ledger)
            first = ledger.cached_index
            assert ledger.keys is not None
            self.pool.cache(ledger.index[first:full], ledger.keys[first:full])
            ledger.cached_index = full
        self._plan_seal(request, ledger.cached_index)

    def end_step(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        limits = self.limits
        budget = max(self._write_back_budget - self._tier.restores_to_send, 0)
        self._tier.restores_to_send = 0
        window = limits.admission_cap_pages
        page_tokens = limits.page_tokens
        leases_at_once = not self.option_values["lease_next_step"]
        for request, tokens in scheduled:
            ledger = request.ledger
            assert isinstance(ledger, HybridLedger)
            sealed = tokens // page_tokens
            if sealed > ledger.planned:
                budget -= self._tier.write_back(ledger, min(sealed, ledger.planned + budget))
            if ledger.adopt_pages:
                self._resident.adopt(ledger)
            if ledger.hot is None and (self.pool.num_free < self._low_water or ledger.num_pages >= window):
                ledger.wants_more = True
                if leases_at_once and self.pool.num_free >= limits.hot_blocks:
                    self._lease(ledger)
                else:
                    request.wake = 0
            if ledger.hot is not None and ledger.num_clean_pinned:
                self._resident.release_clean(ledger)
        self._resident.tell_lost()

    def loaded(self, request: Request) -> None:
        """The last page comes back to the GPU too: the request's next tokens may be written there."""
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        self._tier.restore_last_page(ledger)

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        """Clean pages stay in the pool as copies; dirty ones are dropped, unless a write-back holds them."""
        ledger = request.ledger
        assert isinstance(ledger, HybridLedger)
        del self._ledgers[request.request_id]
        self._num_hot -= ledger.hot is not None
        self._resident.num_adopting -= ledger.adopt_pages > 0
        self._tier.leave(ledger, finished=finished)
        dirty = self._resident.leave(ledger)
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

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        self._tier.notify(updates)

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
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
            ledger.check(request, self.limits)
            frames = ledger.frames[: ledger.num_pages]
            np.add.at(readers, frames[frames != NO_FRAME], 1)
        if np.any(readers != self.frames.readers):
            raise LawBroken("L1: page tables and the frames' readers disagree")
