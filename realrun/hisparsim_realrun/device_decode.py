"""Decodes with the Triton kernels from end to end: nothing of a selection comes back to the host.

Index logits, top-k, residency resolve (with exact LRU), row gather and sparse MLA of all decodes of a step
run on the pools' device; the host only sends the lines of the block tables that the step needs. Host blocks
keep one generation for good: a request slot's hot buffer is emptied whenever it changes hands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.hot_state import HostGenerations, HotStates, reset_requests
from hisparsim_kernels.indexer import MAX_QUERY_LEN, indexer_logits
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
from hisparsim_kernels.topk import topk

from .errors import RealRunError, RunDied
from .geometry import Unit
from .residency import Residency
from .tables import RequestTable, TableChanges
from .triton_kernels import TritonKernels, quantised
from .work import Span

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where the decodes' selected rows lie, on the device: rows [queries, top_k], counts [queries]."""

    rows: torch.Tensor
    counts: torch.Tensor


class DeviceDecode:
    """Selects, resolves, fetches and attends for the decodes of a step."""

    def __init__(
        self,
        kernels: TritonKernels,
        residency: Residency,
        *,
        max_requests: int,
        hot_rows: int,
        query_len: int,
        num_host_blocks: int,
    ) -> None:
        """Raises RealRunError for more drafts than the index kernel verifies at once."""
        if query_len > MAX_QUERY_LEN:
            raise RealRunError(
                f"speculation.draft_tokens = {query_len - 1}: the index kernel verifies {MAX_QUERY_LEN - 1} "
                "drafts at most"
            )
        self.kernels = kernels
        self.residency = residency
        self.query_len = query_len
        self.hot_rows = hot_rows
        self.device = kernels.pools.gpu.device
        geometry = kernels.pools.geometry
        self.max_requests = max_requests
        self.max_pages = residency.tables.max_pages
        # Direct requests hold one page beyond the buffer, for their newest rows.
        hot_pages = -(-hot_rows // residency.page_rows) + 1
        self.states = HotStates.allocate(len(geometry.units), max_requests, hot_rows, self.device)
        self.generations = HostGenerations.allocate(max(num_host_blocks, 1), self.device)
        self.tables = [
            ResidencyTables(
                self._empty(max_requests, self.max_pages),
                self._empty(max_requests, self.max_pages),
                self._empty(max_requests, hot_pages),
                self.generations.generations,
                geometry.rows_per_block,
                residency.page_rows,
            )
            for _ in range(geometry.num_groups)
        ]

        self._rows = torch.zeros(4, dtype=torch.int64, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def _ints(self, values: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.device, non_blocking=True)

    # -- state ------------------------------------------------------------------------------------

    def settle(self, changes: TableChanges) -> None:
        """Change: empty or fill hot buffers as the tables changed."""
        slots = [*changes.emptied, *(table.slot for table in changes.warmed)]
        if slots and max(slots) >= self.max_requests:
            raise RunDied(f"{max(slots) + 1} requests hold memory at once, {self.max_requests} were expected")
        if slots:
            reset_requests(self.states, self._ints(np.array(slots)))
        for table in changes.warmed:
            leased = table.hot.shape[1] * self.residency.page_rows
            self._place(table, np.arange(min(leased, self.hot_rows)), slice(None))

    def _place(self, table: RequestTable, positions: Ints, units: slice | int) -> None:
        """Slot i holds position i, for these positions."""
        where = self._ints(positions).long()
        owners = self._ints(table.host[positions // self.residency.page_rows])
        self.states.positions[units, table.slot, where] = where.int()
        self.states.generations[units, table.slot, where] = owners

    def begin(self, spans: tuple[Span, ...]) -> None:
        """Change: send the block tables of a step's decodes."""
        if not spans:
            return
        tables = [self.residency.tables[span.request_id] for span in spans]
        slots = self._ints(np.array([table.slot for table in tables])).long()
        for group, own in enumerate(self.tables):
            resident = np.stack([table.resident[:, group] for table in tables])
            own.resident_blocks[slots] = self._ints(np.where(resident > 0, resident, -1))
            host = np.stack([table.host for table in tables])
            own.host_blocks[slots] = self._ints(np.where(host > 0, host, -1))
            hot = np.full((len(tables), own.hot_blocks.shape[1]), -1, np.int32)
            for line, table in zip(hot, tables, strict=True):
                line[: table.hot.shape[1]] = table.hot[group]
            own.hot_blocks[slots] = self._ints(hot)

    def attend(self, layer: int, queries: torch.Tensor, placed: Placed, scale: float) -> torch.Tensor:
        """[tokens, heads, 512] sparse MLA of the decodes' queries over their rows."""
        return self.kernels.attend_rows(layer, queries, placed.rows, placed.counts, scale)

    # -- a unit -----------------------------------------------------------------------------------

    def place(
        self,
        spans: tuple[Span, ...],
        unit: Unit,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keep_newest: torch.Tensor,
        new_rows: Ints,
    ) -> Placed:
        """Change: select for the decodes' tokens, find every row, fetch what is missing in the unit's layers.

        queries [tokens, heads, 128], weights [tokens, heads], keep_newest [tokens]: the spans' tokens in one
        line; new_rows [tokens]: where their own rows were written.
        """
        q, batch = self.query_len, len(spans)
        # A span with fewer tokens than query_len has its tokens last; the lines before them select nothing.
        line = np.concatenate(
            [np.arange((i + 1) * q - span.count, (i + 1) * q) for i, span in enumerate(spans)]
        )
        own = self._ints(line).long()
        codes, scaled = quantised(queries, weights)
        wide_codes = torch.zeros(batch * q, *codes.shape[1:], dtype=torch.uint8, device=self.device)
        wide_codes[own] = codes.view(torch.uint8)
        wide_weights = torch.zeros(batch * q, scaled.shape[1], device=self.device)
        wide_weights[own] = scaled
        tables = [self.residency.tables[span.request_id] for span in spans]
        ends = np.array([span.end for span in spans])
        lengths, pages = self._ints(ends), -(-int(ends.max()) // self.residency.page_rows)
        tokens = pages * self.residency.page_rows
        logits = torch.empty(batch, q, tokens, device=self.device)
        indexer_logits(
            wide_codes.view(torch.float8_e4m3fn).view(batch, q, -1, codes.shape[2]),
            wide_weights.view(batch, q, -1),
            self.kernels.pools.index_pages(unit.index),
            self._ints(np.stack([table.index[:pages] for table in tables])),
            lengths,
            logits,
            page_size=self.residency.page_rows,
        )
        flat = logits.view(batch * q, tokens)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        newest = self._ints(positions).long()
        keep = keep_newest.to(self.device)
        flat[own[keep], newest[keep]] = float("inf")
        selection, counts = topk(flat, lengths, self.kernels.top_k, query_len=q)
        if len(line) < batch * q:
            padding = self._ints(np.setdiff1d(np.arange(batch * q), line)).long()
            selection[padding] = -1
            counts[padding] = 0
        plan = self._resolve(spans, tables, unit, selection, lengths, tokens)
        rows = self._with_new_rows(spans, tables, selection, plan.rows, new_rows)
        return Placed(rows[own].contiguous(), counts[own].contiguous())

    def _resolve(
        self,
        spans: tuple[Span, ...],
        tables: list[RequestTable],
        unit: Unit,
        selection: torch.Tensor,
        lengths: torch.Tensor,
        max_tokens: int,
    ) -> ResolvePlan:
        batch, k, pools = len(spans), selection.shape[1], self.kernels.pools
        for span, table in zip(spans, tables, strict=True):
            if table.is_direct and span.start < self.hot_rows:
                own = np.arange(span.start, min(span.end, self.hot_rows))
                self._place(table, own, unit.index)
        readable = [
            span.start if table.is_direct else span.end for span, table in zip(spans, tables, strict=True)
        ]
        if any(table.is_direct for table in tables):
            lengths = self._ints(np.array(readable))
        plan = ResolvePlan.allocate(batch, self.query_len, k, self.device)
        resolve(
            selection,
            lengths,
            self._ints(np.array([table.slot for table in tables])),
            self.tables[unit.group],
            self.states.group(unit.index),
            plan,
            ResolveScratch.allocate(batch, self.query_len, k, self.hot_rows, max_tokens, self.device),
            query_len=self.query_len,
        )
        gather_rows(
            pools.host,
            pools.gpu,
            plan.miss_host_rows,
            plan.miss_hot_rows,
            plan.num_misses,
            pools.geometry.layout,
            group=unit.group,
            first_layer=unit.first_in_group,
            num_layers=len(unit.layers),
        )
        self._rows += plan.stats.sum(0) * len(unit.layers)
        return plan

    def count_rows(self) -> int:
        """Change: add the step's rows to the residency's counts; returns those that were fetched."""
        resident, hits, missed, nowhere = self._rows.tolist()
        self._rows.zero_()
        if nowhere:
            raise RunDied(f"{nowhere} selected rows were neither on the GPU nor in the host")
        counts = self.residency.counts
        counts.resident += resident
        counts.hit += hits
        counts.missed += missed
        return int(missed)

    def _with_new_rows(
        self,
        spans: tuple[Span, ...],
        tables: list[RequestTable],
        selection: torch.Tensor,
        rows: torch.Tensor,
        new_rows: Ints,
    ) -> torch.Tensor:
        """Rows of direct requests' own new tokens, which lie in no page, put in place."""
        if not any(table.is_direct for table in tables):
            return rows
        q, at = self.query_len, 0
        starts = np.full((len(spans), q), np.iinfo(np.int32).max, np.int64)
        own = np.zeros((len(spans), q, q), np.int64)
        for i, (span, table) in enumerate(zip(spans, tables, strict=True)):
            if table.is_direct:
                starts[i] = span.start
                own[i, :, : span.count] = new_rows[at : at + span.count]
            at += span.count
        first = self._ints(starts.reshape(-1, 1))
        place = (selection - first).clamp(0, q - 1).long()
        replacement = self._ints(own.reshape(-1, q)).gather(1, place)
        return torch.where(selection >= first, replacement, rows)
