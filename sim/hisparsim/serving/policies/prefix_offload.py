"""``prefix-offload``: ``gpu-only`` with a host tier for cached prefixes, as ordinary KV offload does it.

Full pages are copied to the host when they are computed and found there by content after the GPU has lost
them. To run, a request must be on the GPU whole: pages that only the host holds are loaded first, and the
request waits for them with its blocks taken. The tier keeps a copy for each rank (vLLM's
OffloadingConnector), so a rank has its share of the memory; the least recently used pages make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from hisparsim.serving.blocks import BlockPool, LawBroken
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import IntArray, Load, TransferPhase, TransferUpdate, WriteBack
from hisparsim.serving.policies.gpu_only import GpuLedger, GpuOnly
from hisparsim.serving.policy import Census, LateFree, PolicyError, PrefixHit, key_array
from hisparsim.serving.request import Request


class OffloadLedger(GpuLedger):
    """A block table and how far it was offered to the tier."""

    __slots__ = ("offered_pages",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.offered_pages = 0
        """Leading pages that are in the tier, on their way to it, or were refused for lack of room."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixOffload(GpuOnly):
    name = "prefix-offload"
    summary = "gpu-only with a host tier for cached prefixes; a request must be fully on the GPU to run"
    ledger_class = OffloadLedger
    grows_quietly = False  # full pages start copies

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        if limits.offload_blocks < 1:
            raise PolicyError(f"policy {self.name}: its host tier holds no page; raise kv.prefix_offload_gib")
        self.tier = BlockPool(limits.offload_blocks + 1, "offload tier")
        self._next_transfer = 0
        self._stores: dict[int, tuple[IntArray, IntArray, list[int]]] = {}  # GPU blocks, tier blocks, keys
        self._loads: dict[int, tuple[int, IntArray]] = {}  # transfer -> request, tier blocks
        self._loading: dict[int, OffloadLedger] = {}
        self._abandoned: dict[int, IntArray] = {}  # request that left while loading -> its blocks

    # -- queries ----------------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit:
        hit = super().lookup(request)
        if not self.limits.prefix_caching or request.page_keys is None:
            return hit
        page = self.limits.page_tokens
        on_gpu = hit.tokens // page
        behind = self.tier.find_prefix(request.keys((request.known - 1) // page)[on_gpu:])
        if not behind:
            return hit
        blocks = hit.blocks if hit.blocks else (np.empty(0, np.int64),)
        return PrefixHit(hit.tokens, len(behind) * page, (*blocks, np.array(behind, np.int64)))

    def quiet_until(self, request: Request) -> int:
        ledger = request.ledger
        assert isinstance(ledger, OffloadLedger)
        next_store = (ledger.offered_pages + 1) * self.limits.page_tokens
        return min(super().quiet_until(request), next_store + self.limits.async_depth - 2)

    def census(self, running: Sequence[Request]) -> Census:
        counts = super().census(running)
        tables = sum(self._pages_of(request) for request in running)
        counts.orphans = max(counts.resident_pinned - tables, 0)
        counts.resident_pinned -= counts.orphans
        counts.host_used = self.tier.num_usable - self.tier.num_free + self.tier.num_keyed_free
        counts.pending_transfers = len(self._stores) + len(self._loads)
        return counts

    # -- changes ----------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        if not super().admit(request, hit, num_tokens, reserve=reserve):
            return False
        ledger = request.ledger
        assert isinstance(ledger, OffloadLedger)
        page = self.limits.page_tokens
        first = hit.tokens // page
        ledger.offered_pages = first + hit.loaded_tokens // page
        if hit.loaded_tokens:
            tier_blocks = hit.blocks[-1]
            self.tier.touch(tier_blocks)
            transfer_id = self._new_transfer()
            self._loads[transfer_id] = (request.request_id, tier_blocks)
            self._loading[request.request_id] = ledger
            count = len(tier_blocks)
            self.actions.append(
                Load(
                    transfer_id,
                    request.request_id,
                    count,
                    count * self.limits.block_bytes,
                    key_array(request.keys(first + count)[first:]),
                    ledger.blocks[first : first + count].copy(),
                )
            )
        return True

    def resume(self, request: Request, num_tokens: int, *, reserve: int) -> bool:
        if not super().resume(request, num_tokens, reserve=reserve):
            return False
        self._loading.pop(request.request_id, None)
        return True

    def end_step(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        if not self.limits.prefix_caching:
            return
        page = self.limits.page_tokens
        for request, tokens in scheduled:
            ledger = request.ledger
            assert isinstance(ledger, OffloadLedger)
            full = tokens // page
            if full > ledger.offered_pages and request.page_keys is not None:
                self._store(request, ledger, min(full, len(request.page_keys)))

    def _store(self, request: Request, ledger: OffloadLedger, full: int) -> None:
        """Copy pages that the tier lacks, in runs of consecutive pages; what finds no room is left out."""
        first = ledger.offered_pages
        keys = request.keys(full)
        missing = [page for page in range(first, full) if self.tier.find(keys[page]) is None]
        ledger.offered_pages = max(full, first)
        missing = missing[: self.tier.num_free]
        if not missing:
            return
        pages = np.array(missing, np.int64)
        for run in np.split(pages, np.nonzero(np.diff(pages) != 1)[0] + 1):
            blocks = ledger.blocks[run].copy()
            tier_blocks = self.tier.take(len(run))
            self.pool.touch(blocks)
            transfer_id = self._new_transfer()
            self._stores[transfer_id] = (blocks, tier_blocks, [keys[page] for page in run.tolist()])
            self.actions.append(
                WriteBack(
                    transfer_id,
                    request.request_id,
                    int(run[0]),
                    tier_blocks,
                    blocks[:, None],
                    len(run) * self.limits.block_bytes,
                )
            )

    def _new_transfer(self) -> int:
        self._next_transfer += 1
        return self._next_transfer - 1

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        loading = self._loading.pop(request.request_id, None)
        if loading is not None and any(owner == request.request_id for owner, _ in self._loads.values()):
            self._abandoned[request.request_id] = loading.blocks[: loading.num_pages].copy()
            return None  # the load still writes them
        return super().leave(request, finished=finished, in_flight=in_flight)

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        for update in updates:
            if update.phase is not TransferPhase.DONE:
                continue
            if update.transfer_id in self._stores:
                blocks, tier_blocks, keys = self._stores.pop(update.transfer_id)
                self.tier.cache(tier_blocks, key_array(keys))
                self.tier.release(tier_blocks)
                self.pool.release(blocks[::-1])
            elif update.transfer_id in self._loads:
                request_id, tier_blocks = self._loads.pop(update.transfer_id)
                self.tier.release(tier_blocks[::-1])
                abandoned = self._abandoned.pop(request_id, None)
                if abandoned is not None:
                    self.pool.release(abandoned[::-1])

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
        super().check(running)
        self.tier.check()
        stored = sum(len(tier_blocks) for _, tier_blocks, _ in self._stores.values())
        loading = np.zeros(self.tier.num_blocks, np.int64)
        for _, tier_blocks in self._loads.values():
            loading[tier_blocks] += 1
        if int(self.tier.ref.sum()) != stored + int(loading.sum()):
            raise LawBroken(f"L2: the tier counts {int(self.tier.ref.sum())} holders")

    def _held_elsewhere(self) -> list[IntArray]:
        loading = [ledger.blocks[: ledger.num_pages] for ledger in self._loading.values()]
        return [*loading, *self._abandoned.values(), *(blocks for blocks, _, _ in self._stores.values())]
