"""Block tables: where each page of each request lies, kept from the plans' actions alone, in their order.

Host-side numpy arrays, one line a request slot; kernels on a GPU get copies of the lines in use. Entry 0
stands for "not here".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hisparsim.serving.plan import (
    Action,
    Admit,
    Adopt,
    Allocate,
    Finish,
    IntArray,
    LeaseHot,
    Lose,
    Preempt,
)


@dataclass(slots=True, eq=False)
class RequestTable:
    """One request's pages."""

    request_id: int
    slot: int
    """Line of the hot buffers' state."""
    index: IntArray
    """[pages] block of the indexer page (of the whole page, in a whole pool)."""
    host: IntArray
    """[pages]"""
    resident: IntArray
    """[pages, groups]; in a whole pool the same as ``index``."""
    hot: IntArray
    """[groups, hot pages], [groups, 0] before the lease."""
    is_direct: bool = False
    """New rows are written into the hot buffer and the host; no page is resident (SGLang's way)."""


@dataclass(slots=True)
class TableChanges:
    """Request slots whose hot buffer was emptied or, from rows that already lie there, filled."""

    emptied: list[int] = field(default_factory=list)
    warmed: list[RequestTable] = field(default_factory=list)


class BlockTables:
    """Tables of all admitted requests."""

    def __init__(self, *, packed: bool, num_groups: int, max_pages: int) -> None:
        self.packed = packed
        self.num_groups = num_groups
        self.max_pages = max_pages
        self.tables: dict[int, RequestTable] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0

    def __getitem__(self, request_id: int) -> RequestTable:
        return self.tables[request_id]

    def apply(self, action: Action, changes: TableChanges) -> None:
        """Change: one action's effect on the tables. Copies of pages are the executor's business."""
        if isinstance(action, Admit):
            self._admit(action, changes)
            return
        table = self.tables.get(action.request_id)
        if table is None:
            return  # news of a request that left in the meantime
        if isinstance(action, Allocate):
            self._allocate(table, action)
        elif isinstance(action, LeaseHot):
            self._lease(table, action.blocks, changes)
        elif isinstance(action, Lose):
            table.resident[action.pages] = 0
        elif isinstance(action, Adopt):
            table.resident[action.pages] = action.blocks
        elif isinstance(action, (Finish, Preempt)):
            self._free_slots.append(self.tables.pop(action.request_id).slot)

    def _admit(self, action: Admit, changes: TableChanges) -> None:
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._num_slots += 1
        pages = self.max_pages
        table = RequestTable(
            action.request_id,
            self._free_slots.pop(),
            np.zeros(pages, np.int64),
            np.zeros(pages, np.int64),
            np.zeros((pages, self.num_groups), np.int64),
            np.zeros((self.num_groups, 0), np.int64),
        )
        if action.hit_blocks and self.packed:
            host, index = action.hit_blocks
            table.host[: len(host)] = host
            table.index[: len(index)] = index
        elif action.hit_blocks:
            blocks = action.hit_blocks[0]
            table.index[: len(blocks)] = table.resident[: len(blocks), 0] = blocks
        self.tables[action.request_id] = table
        changes.emptied.append(table.slot)

    def _allocate(self, table: RequestTable, action: Allocate) -> None:
        first, count = action.first_page, len(action.index_blocks)
        pages = slice(first, first + count)
        table.index[pages] = action.index_blocks
        if len(action.host_blocks):
            table.host[pages] = action.host_blocks
        if not self.packed:
            table.resident[pages, 0] = action.index_blocks
        elif action.resident_blocks.shape[1]:
            table.resident[pages] = action.resident_blocks

    def _lease(self, table: RequestTable, blocks: IntArray, changes: TableChanges) -> None:
        """A first lease, a longer one, or the request's own first pages turned into its hot buffer."""
        leased = table.hot.shape[1]
        grows = leased > 0 and np.array_equal(blocks[:, :leased], table.hot)
        converts = leased == 0 and bool(table.resident[0].any()) and blocks[0, 0] == table.resident[0, 0]
        table.hot = blocks.copy()
        if converts:
            table.resident[:] = 0
            table.is_direct = True
            changes.warmed.append(table)
        elif not grows:
            changes.emptied.append(table.slot)
