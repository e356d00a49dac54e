"""The recorder: listens to a run and keeps one row a request and one row a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.core import Completion

BASE_COLUMNS = (
    "start_ns",
    "duration_ns",
    "num_decodes",
    "decode_tokens",
    "prefill_tokens",
    "running",
    "waiting",
    "num_full",
    "num_mixed",
    "num_none",
    "free_blocks",
    "index_blocks",
    "resident_pinned_blocks",
    "resident_released_blocks",
    "hot_blocks",
    "other_blocks",
    "host_blocks_used",
    "h2d_bytes",
    "d2h_bytes",
    "missed_millirows",
    "preemptions",
)


class StepTable:
    """A growing int64 table, one row a step."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._rows = np.zeros((1024, len(self.columns)), np.int64)
        self.num_rows = 0

    def append(self, row: Sequence[int]) -> None:
        self._room(1)
        self._rows[self.num_rows] = row
        self.num_rows += 1

    def extend(self, rows: NDArray[np.int64]) -> None:
        """Append [k, columns]."""
        self._room(len(rows))
        self._rows[self.num_rows : self.num_rows + len(rows)] = rows
        self.num_rows += len(rows)

    def _room(self, count: int) -> None:
        while self.num_rows + count > len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])

    def as_columns(self) -> dict[str, NDArray[np.int64]]:
        rows = self._rows[: self.num_rows]
        return {name: rows[:, index].copy() for index, name in enumerate(self.columns)}


class TokenClock:
    """First tokens, finishes and inter-token gaps of each request, by the end times of steps."""

    def __init__(self, num_requests: int) -> None:
        self.admitted_ns = np.full(num_requests, -1, np.int64)
        self.first_token_ns = np.full(num_requests, -1, np.int64)
        self.finish_ns = np.full(num_requests, -1, np.int64)
        self.output_tokens = np.zeros(num_requests, np.int64)
        self.hit_tokens = np.zeros(num_requests, np.int64)
        self.num_preemptions = np.zeros(num_requests, np.int64)
        self._last_ns: dict[int, int] = {}
        self._gaps: dict[int, int] = {}

    def tokens(self, completion: Completion, now_ns: int) -> None:
        """Chunks of tokens came back at one instant."""
        last, gaps = self._last_ns, self._gaps
        for request, kept in completion.tokens:
            row = request.request_id
            before = last.get(row)
            if before is None:
                self.first_token_ns[row] = now_ns
            else:
                gap = now_ns - before
                gaps[gap] = gaps.get(gap, 0) + 1
            last[row] = now_ns
            self.output_tokens[row] += kept
        for request in completion.finished:
            row = request.request_id
            self.finish_ns[row] = now_ns
            self.num_preemptions[row] = request.num_preemptions
            self.hit_tokens[row] = request.hit_tokens or 0
            del last[row]

    def stretch(self, rows: Sequence[int], ends_ns: NDArray[np.int64]) -> None:
        """Each of these requests gained one token at the end of each of these steps, and had one before."""
        gaps, last = self._gaps, self._last_ns
        first_end = int(ends_ns[0])
        for row in rows:
            gap = first_end - last[row]
            gaps[gap] = gaps.get(gap, 0) + 1
            last[row] = int(ends_ns[-1])
        self.output_tokens[list(rows)] += len(ends_ns)
        values, counts = np.unique(np.diff(ends_ns), return_counts=True)
        for gap, count in zip(values.tolist(), counts.tolist(), strict=True):
            gaps[gap] = gaps.get(gap, 0) + count * len(rows)

    def gap_weights(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(gap_ns, weight), sorted by gap."""
        gaps = np.array(sorted(self._gaps), np.int64)
        return gaps, np.array([self._gaps[int(gap)] for gap in gaps], np.int64)
