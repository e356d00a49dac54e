"""From tokens to rows: where new rows are written and where selected rows are read, by the block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import RunDied
from .geometry import Geometry, Unit
from .hot import HotBuffers
from .tables import BlockTables, RequestTable, TableChanges
from .work import Span

Ints = NDArray[np.int64]


@dataclass(slots=True)
class RowCounts:
    """Distinct rows that decodes selected, by place, summed over layers."""

    resident: int = 0
    hit: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """Rows of one decode's selection."""

    rows: Ints
    """[queries, k] flat rows of the GPU pool, 0 for none."""
    miss_host_rows: Ints
    """[misses] host block * page rows + row."""
    miss_rows: Ints
    """[misses] flat rows of the GPU pool that receive them."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Pages of one prefill span's context that are read from the host."""

    rows: Ints
    """[pages] first flat row of each page of the context, staged ones in staging blocks."""
    host_rows: Ints
    """[staged rows] host rows."""
    staged_rows: Ints
    """[staged rows] flat rows that receive them."""


class Residency:
    """Tables and hot buffers of one rank, and what they mean for tokens."""

    def __init__(
        self, geometry: Geometry, tables: BlockTables, hot: HotBuffers, first_staging_block: int
    ) -> None:
        self.geometry = geometry
        self.tables = tables
        self.hot = hot
        self.first_staging_block = first_staging_block
        self.page_rows = geometry.layout.page_rows
        self.counts = RowCounts()

    def settle(self, changes: TableChanges) -> None:
        """Change: empty or fill hot buffers as the tables changed."""
        for slot in changes.emptied:
            self.hot.reset(slot)
        for table in changes.warmed:
            leased = table.hot.shape[1] * self.page_rows
            self.hot.reset(table.slot, min(leased, self.hot.hot_rows))

    # -- new rows ---------------------------------------------------------------------------------

    def new_rows(self, span: Span, group: int) -> Ints:
        """[count] flat rows of the pool where the rows of a span's tokens go.

        Raises:
            RunDied: a token has no place.
        """
        table = self.tables[span.request_id]
        positions = np.arange(span.start, span.end)
        pages, places = np.divmod(positions, self.page_rows)
        blocks = table.resident[pages, group].astype(np.int64)
        if table.is_direct:
            return self._direct_rows(table, group, positions, span.start)
        if not blocks.all():
            raise RunDied(
                f"request {span.request_id}, token {int(positions[np.argmin(blocks != 0)])}: its page has no "
                "block to be written to"
            )
        rows: Ints = blocks * self.geometry.rows_per_block + places
        return rows

    def _direct_rows(self, table: RequestTable, group: int, positions: Ints, start: int) -> Ints:
        """Rows of a request without resident pages: the slot of the position, or the newest rows' page."""
        leased = table.hot.shape[1] * self.page_rows
        whole_buffer = -(-self.hot.hot_rows // self.page_rows) * self.page_rows
        newest = positions - start + leased - self.page_rows if leased > whole_buffer else positions
        rows = np.where(positions < self.hot.hot_rows, positions, newest)
        return self._hot_rows(table, group, rows)

    def _hot_rows(self, table: RequestTable, group: int, slots: Ints) -> Ints:
        pages, places = np.divmod(slots, self.page_rows)
        rows: Ints = table.hot[group, pages].astype(np.int64) * self.geometry.rows_per_block + places
        return rows

    def host_rows(self, span: Span) -> Ints:
        """[count] host rows of a span's tokens."""
        return self._host_rows(self.tables[span.request_id], np.arange(span.start, span.end))

    def _host_rows(self, table: RequestTable, positions: Ints) -> Ints:
        pages, places = np.divmod(positions, self.page_rows)
        rows: Ints = table.host[pages].astype(np.int64) * self.page_rows + places
        return rows

    def place_direct(self, span: Span, unit: Unit) -> None:
        """Change: tokens of a request without resident pages were written into their own hot slots."""
        table = self.tables[span.request_id]
        if table.is_direct and span.start < self.hot.hot_rows:
            own = np.arange(span.start, min(span.end, self.hot.hot_rows))
            self.hot.place(unit.index, table.slot, own)

    # -- reading ----------------------------------------------------------------------------------

    def resolve(self, span: Span, unit: Unit, selection: Ints) -> Resolved:
        """Change: rows of a decode's selection [queries, k], -1 for none; moves its hot buffer on.

        Raises:
            RunDied: a selected row can be read nowhere.
        """
        table = self.tables[span.request_id]
        valid = selection >= 0
        positions = selection[valid]
        wanted = positions
        if len(selection) > 1:
            _, first = np.unique(positions, return_index=True)
            wanted = positions[np.sort(first)]
        rows_of: Ints = np.zeros(int(wanted.max()) + 1, np.int64)
        blocks = table.resident[wanted // self.page_rows, unit.group].astype(np.int64)
        places = wanted % self.page_rows
        here = blocks > 0
        rows_of[wanted[here]] = blocks[here] * self.geometry.rows_per_block + places[here]
        if table.is_direct:
            new = wanted >= span.start
            rows_of[wanted[new]] = self._direct_rows(table, unit.group, wanted[new], span.start)
            here |= new
        absent = wanted[~here]
        host_rows = miss_rows = np.empty(0, np.int64)
        if len(absent):
            if not table.hot.shape[1]:
                raise RunDied(
                    f"request {span.request_id}, token {int(absent[0])}: its page is not on the GPU and the "
                    "request owns no hot buffer"
                )
            found = self.hot.look_up(unit.index, table.slot, absent)
            rows = self._hot_rows(table, unit.group, found.slots)
            rows_of[absent] = rows
            host_rows = self._host_rows(table, absent[found.missed])
            miss_rows = rows[found.missed]
            if len(host_rows) and int(host_rows.min()) < self.page_rows:
                raise RunDied(
                    f"request {span.request_id}: a selected page is neither on the GPU nor the host"
                )
        layers = len(unit.layers)
        self.counts.resident += int(np.count_nonzero(here)) * layers
        self.counts.hit += (len(absent) - len(host_rows)) * layers
        self.counts.missed += len(host_rows) * layers
        resolved = np.zeros(selection.shape, np.int64)
        resolved[valid] = rows_of[positions]
        return Resolved(resolved, host_rows, miss_rows)

    def num_absent_pages(self, span: Span) -> int:
        """Pages of a span's context that are not on the GPU."""
        table = self.tables[span.request_id]
        return int(np.count_nonzero(table.resident[: self._pages(span), 0] == 0))

    def stage(self, span: Span, group: int, first_block: int) -> Staging:
        """Query: where a prefill span's context is read, absent pages from staging blocks ``first_block`` on.

        Raises:
            RunDied: a page lies nowhere.
        """
        table = self.tables[span.request_id]
        count = self._pages(span)
        blocks = table.resident[:count, group].astype(np.int64)
        absent = np.nonzero(blocks == 0)[0]
        if len(absent) and not table.host[absent].all():
            raise RunDied(f"request {span.request_id}: a page of its context is nowhere to be read")
        blocks[absent] = self.first_staging_block + first_block + np.arange(len(absent))
        places = np.arange(self.page_rows)
        staged = blocks[absent, None] * self.geometry.rows_per_block + places
        host = table.host[absent, None].astype(np.int64) * self.page_rows + places
        return Staging(blocks * self.geometry.rows_per_block, host.ravel(), staged.ravel())

    def _pages(self, span: Span) -> int:
        return -(-span.end // self.page_rows)
