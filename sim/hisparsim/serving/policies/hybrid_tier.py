"""The host tier under ``hybrid``: pages written back, what of them can be found there, pages restored.

A write-back holds its host blocks and frames until it is done. Full pages become findable as soon as they and
all before them are durable, also for a request that finished meanwhile (*detached*).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparsim.serving.blocks import BlockPool
from hisparsim.serving.frames import NO_FRAME
from hisparsim.serving.plan import Action, IntArray, Restore, TransferPhase, TransferUpdate, WriteBack
from hisparsim.serving.policies.hybrid_ledger import KEPT_TAIL_PAGES, HybridLedger, PageTransfer
from hisparsim.serving.policies.hybrid_resident import ResidentPages


class HostTier:
    """Transfers under way, and the prefixes that the host pool holds whole."""

    def __init__(
        self,
        host: BlockPool,
        resident: ResidentPages,
        ledgers: dict[int, HybridLedger],
        actions: list[Action],
        *,
        page_bytes: int,
        mirrored: bool,
    ) -> None:
        """A page has ``page_bytes``; with ``mirrored`` rows its write-back moves none of them."""
        self.transfers: dict[int, PageTransfer] = {}
        self.restores_to_send = 0
        """Restores that the next plan starts."""
        self._host = host
        self._resident = resident
        self._frames = resident.frames
        self._ledgers = ledgers
        self._actions = actions
        self._page_bytes = page_bytes
        self._mirrored = mirrored
        self._detached: dict[HybridLedger, IntArray] = {}
        self._next_transfer = 0

    def num_pages_moving(self) -> int:
        """Query: pages whose transfer is under way."""
        return sum(len(transfer.frames) for transfer in self.transfers.values())

    def will_free(self) -> bool:
        """Query: whether a transfer is under way whose completion can free something."""
        for transfer in self.transfers.values():
            ledger = transfer.ledger
            if ledger.hot is not None and self._ledgers.get(ledger.request_id) is ledger:
                return True
            if np.any(self._host.ref[transfer.host_blocks] == 1):
                return True
        return False

    # -- transfers --------------------------------------------------------------------------------

    def write_back(self, ledger: HybridLedger, sealed: int) -> int:
        """Change: start the copy of every sealed page that has none; returns how many."""
        first = ledger.planned
        if sealed <= first:
            return 0
        transfer_id, transfer = self._start(ledger, first, sealed, restores=False)
        ledger.planned = sealed
        num_bytes = 0 if self._mirrored else (sealed - first) * self._page_bytes
        blocks = self._frames.blocks[transfer.frames]
        self._actions.append(
            WriteBack(transfer_id, ledger.request_id, first, transfer.host_blocks, blocks, num_bytes)
        )
        return sealed - first

    def restore_last_page(self, ledger: HybridLedger) -> None:
        """Change: start the copy of a loaded request's last page to the GPU, where it is written on."""
        last = ledger.num_pages - 1
        transfer_id, transfer = self._start(ledger, last, last + 1, restores=True)
        self.restores_to_send += 1
        host_block, blocks = int(transfer.host_blocks[0]), self._frames.blocks[transfer.frames[0]]
        self._actions.append(
            Restore(transfer_id, ledger.request_id, last, host_block, blocks, self._page_bytes)
        )

    def _start(
        self, ledger: HybridLedger, first: int, end: int, *, restores: bool
    ) -> tuple[int, PageTransfer]:
        transfer = PageTransfer(ledger, first, end, ledger.frames[first:end].copy(), restores=restores)
        self._host.ref[transfer.host_blocks] += 1  # the request holds both already
        self._frames.add_shared_pin(transfer.frames)
        ledger.writing[first:end] = True
        ledger.num_writing += end - first
        transfer_id = self.new_transfer_id()
        self.transfers[transfer_id] = transfer
        return transfer_id, transfer

    def new_transfer_id(self) -> int:
        """Change: the next id."""
        self._next_transfer += 1
        return self._next_transfer - 1

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        """Change: pages whose write-back or restore is enqueued and done are clean."""
        finished = self._take_finished(updates)
        if not finished:
            return
        self._drop_pins(np.concatenate([transfer.frames for transfer in finished]))
        unpinned: list[IntArray] = []
        current: dict[int, HybridLedger] = {}
        for transfer in finished:
            ledger, first, end = transfer.ledger, transfer.first, transfer.end
            ledger.writing[first:end] = False
            ledger.num_writing -= end - first
            ledger.host_valid[first:end] = True
            if self._ledgers.get(ledger.request_id) is not ledger:
                self._finish_detached(transfer)
                continue
            current[ledger.request_id] = ledger
            ledger.clean_pinned[first:end] = True
            ledger.num_clean_pinned += end - first
            if transfer.restores:
                self._frames.record_copies(transfer.frames, self._host.key[transfer.host_blocks])
            self._host.ref[transfer.host_blocks] -= 1  # its request holds them still
            if ledger.hot is not None:
                end = min(end, ledger.num_pages - KEPT_TAIL_PAGES)
                if end > first:
                    unpinned.append(self._resident.release(ledger, np.arange(first, end, dtype=np.int64)))
        if unpinned:
            self._frames.unpin(np.concatenate(unpinned))
        for ledger in current.values():
            ledger.count_ready()
            self.publish(ledger)

    def _take_finished(self, updates: Sequence[TransferUpdate]) -> list[PageTransfer]:
        for update in updates:
            transfer = self.transfers.get(update.transfer_id)
            if transfer is None:
                continue
            if update.phase is TransferPhase.ENQUEUED:
                transfer.enqueued = True
            else:
                transfer.done = True
        finished: list[PageTransfer] = []
        for transfer_id in sorted({update.transfer_id for update in updates}):
            transfer = self.transfers.get(transfer_id)
            if transfer is not None and transfer.enqueued and transfer.done:
                finished.append(self.transfers.pop(transfer_id))
        return finished

    def _drop_pins(self, frames: IntArray) -> None:
        last = self._frames.ref[frames] == 1
        if np.count_nonzero(last):  # pages of requests that left meanwhile
            self._frames.release(frames[last], group_major=False)
        self._frames.drop_shared_pin(frames[~last])

    # -- publication ------------------------------------------------------------------------------

    def publish(self, ledger: HybridLedger) -> None:
        """Change: the durable part of the full prefix becomes findable, and its GPU copies with it."""
        if ledger.publish_pages is None:
            return
        ready = min(ledger.publish_pages, ledger.ready_pages)
        first = ledger.cached_host
        if ready > first:
            assert ledger.keys is not None
            self._host.cache(ledger.host[first:ready], ledger.keys[first:ready])
            ledger.cached_host = ready
        first = ledger.copies_recorded
        if ready > first:
            frames = ledger.frames[first:ready]
            readable = (frames != NO_FRAME) & ~ledger.writing[first:ready]
            keys = self._host.key[ledger.host[first:ready]]
            self._frames.record_copies(frames[readable], keys[readable])
            ledger.copies_recorded = ready
        if ledger.ready_pages >= ledger.publish_pages:
            ledger.publish_pages = None

    def leave(self, ledger: HybridLedger, *, finished: bool) -> None:
        """Change: what a finished request has still to publish is held until its write-backs are done."""
        if finished and ledger.publish_pages is not None and ledger.num_writing:
            self._detached[ledger] = ledger.host[: ledger.publish_pages].copy()
            self._host.touch(self._detached[ledger])
        else:
            ledger.publish_pages = None  # a preempted step may not have computed what it was to copy

    def _finish_detached(self, transfer: PageTransfer) -> None:
        """A write-back of a request that left: its prefix becomes findable once the last one is durable."""
        ledger = transfer.ledger
        if ledger.num_writing or ledger not in self._detached:
            self._host.release_one_by_one(transfer.host_blocks)
            return
        self._host.release_one_by_one(transfer.host_blocks[:-1])
        blocks = self._detached.pop(ledger)
        ledger.count_ready()
        first, ready = ledger.cached_host, min(ledger.ready_pages, len(blocks))
        if ready > first:
            assert ledger.keys is not None
            self._host.cache(blocks[first:ready], ledger.keys[first:ready])
        self._host.release(blocks[::-1])
        self._host.release(transfer.host_blocks[-1:])
