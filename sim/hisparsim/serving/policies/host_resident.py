"""``host-resident``: SGLang's HiSparse; every decode reads its context through a hot buffer.

A prompt is computed with all its pages on the GPU (chunk by chunk), then staged: all its rows are copied to
the host, and only then may the request decode. Its first pages become its hot buffer, so it starts warm with
the first rows; the others go back to the pool. From then on a new page takes an indexer block and a host
block, the newest row lives in a slot of its own and is copied to the host one step later. Prefixes are not
shared (the radix cache is off). A request that finds no page is waited for while something is being staged,
else the newest one is preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from hisparsim.serving.blocks import LawBroken
from hisparsim.serving.ledger import RequestLedger
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import (
    Allocate,
    IntArray,
    LeaseHot,
    Release,
    TransferPhase,
    TransferUpdate,
    WriteBack,
)
from hisparsim.serving.policies.host_backed import HostBacked
from hisparsim.serving.policy import (
    NO_HIT,
    Census,
    LateFree,
    PrefixHit,
)
from hisparsim.serving.request import NEVER, Request

_NONE = np.empty(0, np.int64)


class HostLedger(RequestLedger):
    """Pages of one request: ``resident`` until it is staged, ``hot`` from then on."""

    __slots__ = ("host", "hot", "index", "resident", "staging")

    def __init__(self, capacity: int, groups: int) -> None:
        super().__init__()
        self.index: IntArray = np.zeros(capacity, np.int64)
        self.host: IntArray = np.zeros(capacity, np.int64)
        self.resident: IntArray = np.zeros((0, groups), np.int64)
        """[pages, groups] while the prompt is computed and staged, then [0, groups]."""
        self.hot: IntArray | None = None
        """[groups, hot pages]; short requests start with fewer and grow page by page."""
        self.staging: int | None = None
        """The transfer that copies the prompt to the host."""


@mypyc_attr(allow_interpreted_subclasses=True)
class HostResident(HostBacked):
    name = "host-resident"
    summary = "SGLang HiSparse: prefill on the GPU, stage to the host, decode through the hot buffer"
    starts_warm = True

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self.mirrors_decode = True
        self.hot_pages = limits.hot_pages + 1
        """A group's hot pages, the newest row's page included (SGLang: device_buffer_size and one page)."""
        self._staging: dict[int, Request] = {}
        self._left: dict[int, tuple[IntArray, IntArray]] = {}  # staged request left: GPU and host blocks
        self._next_transfer = 0

    # -- queries ----------------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit:
        return NO_HIT

    def admission_blocks(self, request: Request) -> tuple[int, int]:
        prompt = self._known_pages(request)
        return prompt * (1 + self.limits.num_groups), prompt

    def may_wait(self) -> bool:
        return bool(self._staging or self._left)

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        return super().missing_blocks(request, num_tokens) * (1 + self.limits.num_groups)

    def census(self, running: Sequence[Request]) -> Census:
        counts = Census(free=self.pool.num_free, host_used=self.host.num_held)
        counts.pending_transfers = len(self._staging) + len(self._left)
        for request in running:
            ledger = request.ledger
            assert isinstance(ledger, HostLedger)
            counts.index += ledger.num_pages
            counts.resident_pinned += ledger.resident.size
            if ledger.hot is None:
                counts.num_full += 1
            else:
                counts.hot += ledger.hot.size
                counts.num_hot += 1
                counts.num_none += 1
        counts.orphans = self.pool.num_held - counts.index - counts.hot - counts.resident_pinned
        return counts

    def fits_alone(self, request: Request) -> str | None:
        groups, end = self.limits.num_groups, self._end_pages(request)
        # A preempted request computes prompt and output again with all pages on the GPU.
        needed = max(end * (1 + groups), self._known_pages(request) + groups * self.hot_pages)
        wants = f"blocks while its {request.end_tokens:,} tokens are computed"
        return super().fits_alone(request) or self._too_large(
            request, needed, wants, self.pool, "kv.gpu_kv_gib"
        )

    # -- changes ----------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        limits = self.limits
        prompt = self._known_pages(request)
        if prompt > self.host.num_free:
            self.blocked_by = "host_blocks"
            return False
        if prompt * (1 + limits.num_groups) + reserve > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        ledger = HostLedger(self._capacity(request), limits.num_groups)
        request.ledger = ledger
        request.next_seal = NEVER
        self._allocate(request, ledger, self._slots(num_tokens))
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        ledger, limits = request.ledger, self.limits
        assert isinstance(ledger, HostLedger)
        new = max(self._slots(request.computed + num_tokens) - ledger.num_pages, 0)
        if new > self.host.num_free:
            self.blocked_by = "host_blocks"
            return False
        if ledger.hot is None:
            needed = new * (1 + limits.num_groups)
        else:
            grown = min(ledger.hot.shape[1] + new, self.hot_pages) - ledger.hot.shape[1]
            needed = new + limits.num_groups * grown
        if needed > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        self._allocate(request, ledger, ledger.num_pages + new)
        return True

    def _allocate(self, request: Request, ledger: HostLedger, pages: int) -> None:
        first, groups = ledger.num_pages, self.limits.num_groups
        count = pages - first
        if count > 0:
            if pages > len(ledger.index):
                ledger.index = np.concatenate([ledger.index, np.zeros(pages, np.int64)])
                ledger.host = np.concatenate([ledger.host, np.zeros(pages, np.int64)])
            ledger.host[first:pages] = self.host.take(count)
            ledger.index[first:pages] = self.pool.take(count)
            resident = np.empty((count, 0), np.int64)
            if ledger.hot is None:
                resident = self.pool.take(count * groups).reshape(groups, count).T
                ledger.resident = np.concatenate([ledger.resident, resident])
                ledger.num_readable = pages
            ledger.num_pages = pages
            self.actions.append(
                Allocate(
                    request.request_id,
                    first,
                    ledger.index[first:pages].copy(),
                    resident,
                    ledger.host[first:pages].copy(),
                )
            )
            if ledger.hot is not None and ledger.hot.shape[1] < self.hot_pages:
                grown = min(count, self.hot_pages - ledger.hot.shape[1])
                more = self.pool.take(groups * grown).reshape(groups, grown)
                ledger.hot = np.concatenate([ledger.hot, more], axis=1)
                self.actions.append(LeaseHot(request.request_id, ledger.hot))
        request.slot_tokens = ledger.num_pages * self.limits.page_tokens

    def seal(self, request: Request, num_tokens: int) -> None:
        request.next_seal = NEVER  # nothing is shared

    def end_step(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        """A prompt that this step completes is staged next; until then its request does not decode."""
        for request, tokens in scheduled:
            ledger = request.ledger
            assert isinstance(ledger, HostLedger)
            if ledger.hot is None and ledger.staging is None and tokens >= request.known:
                ledger.staging = self._next_transfer
                self._next_transfer += 1
                ledger.paused = True
                self._staging[ledger.staging] = request
                pages = len(ledger.resident)
                self.actions.append(
                    WriteBack(
                        ledger.staging,
                        request.request_id,
                        0,
                        ledger.host[:pages].copy(),
                        ledger.resident.copy(),
                        pages * self.limits.host_block_bytes,
                    )
                )

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        ledger = request.ledger
        assert isinstance(ledger, HostLedger)
        host = ledger.host[: ledger.num_pages][::-1]
        blocks = [ledger.index[: ledger.num_pages][::-1], ledger.resident[::-1].ravel()]
        if ledger.hot is not None:
            blocks.append(ledger.hot.ravel())
        if ledger.staging is not None:
            del self._staging[ledger.staging]
            self._left[ledger.staging] = (np.concatenate(blocks), host)  # the copy still reads them
            return None
        for part in blocks:
            self.pool.release(part)
        self.host.release(host)
        return None

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        for update in updates:
            if update.phase is not TransferPhase.DONE:
                continue
            request = self._staging.pop(update.transfer_id, None)
            if request is not None:
                self._start_decoding(request)
            left = self._left.pop(update.transfer_id, None)
            if left is not None:
                self.pool.release(left[0])
                self.host.release(left[1])

    def _start_decoding(self, request: Request) -> None:
        """The prompt is in the host: its first pages become the hot buffer, the others are free."""
        ledger = request.ledger
        assert isinstance(ledger, HostLedger)
        kept = min(len(ledger.resident), self.hot_pages)
        ledger.hot = ledger.resident[:kept].T.copy()
        released = ledger.resident[kept:]
        self.pool.release(released.ravel())
        ledger.resident = ledger.resident[:0]
        ledger.num_readable = 0
        ledger.staging = None
        ledger.paused = False
        self.actions.append(Release(request.request_id, np.arange(ledger.num_pages, dtype=np.int64)))
        self.actions.append(LeaseHot(request.request_id, ledger.hot))

    # -- laws -------------------------------------------------------------------------------------

    def check(self, running: Sequence[Request]) -> None:
        self.pool.check()
        self.host.check()
        held = np.zeros(self.pool.num_blocks, np.int64)
        on_host = np.zeros(self.host.num_blocks, np.int64)
        for request in running:
            ledger = request.ledger
            assert isinstance(ledger, HostLedger)
            pages = ledger.num_pages
            held[ledger.index[:pages]] += 1
            held[ledger.resident.ravel()] += 1
            on_host[ledger.host[:pages]] += 1
            if ledger.hot is not None:
                held[ledger.hot.ravel()] += 1
            if ledger.hot is None and len(ledger.resident) < self.limits.pages(request.computed):
                raise LawBroken(f"L3: {request!r} computed more than its {len(ledger.resident)} pages hold")
            if ledger.hot is not None and ledger.hot.shape[1] < min(pages, self.hot_pages):
                raise LawBroken(f"L5: {request!r} owns {ledger.hot.shape[1]} hot pages a group")
        for blocks, host in self._left.values():
            held[blocks] += 1
            on_host[host] += 1
        for law, pool, counted in (("L1", self.pool, held), ("L2", self.host, on_host)):
            if np.any(pool.ref != counted):
                block = int(np.nonzero(pool.ref != counted)[0][0])
                raise LawBroken(
                    f"{law}: {pool.name} block {block} counted {pool.ref[block]}, {counted[block]}"
                )
