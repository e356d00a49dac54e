"""The recorder: listens to a run and keeps one row a request and one row a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.progress import Completion

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


Rows = NDArray[np.int64]


class StepTable:
    """A growing int64 table, one row a step."""

    CHUNK_ROWS = 4096
    """Rows are kept in chunks of so many: none is copied when the table grows."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._full: list[Rows] = []
        self._chunk: Rows = np.empty((self.CHUNK_ROWS, len(self.columns)), np.int64)
        self._used = 0  # rows of the last chunk

    @property
    def num_rows(self) -> int:
        return sum(map(len, self._full)) + self._used

    def append(self, row: Sequence[int]) -> None:
        if self._used == len(self._chunk):
            self._start_chunk(1)
        self._chunk[self._used] = row
        self._used += 1

    def extend(self, count: int, columns: Sequence[int | Rows]) -> Rows:
        """Append so many rows, of each column a plain number or one value a row or more.

        Returns:
            [count, columns] the new rows, to be changed before anything else is appended.
        """
        if self._used + count > len(self._chunk):
            self._start_chunk(count)
        rows = self._chunk[self._used : self._used + count]
        self._used += count
        rows[:] = [0 if isinstance(value, np.ndarray) else value for value in columns]
        for column, value in enumerate(columns):
            if isinstance(value, np.ndarray):
                rows[:, column] = value[:count]
        return rows

    def _start_chunk(self, least_rows: int) -> None:
        self._full.append(self._chunk[: self._used])
        self._chunk = np.empty((max(self.CHUNK_ROWS, least_rows), len(self.columns)), np.int64)
        self._used = 0

    def as_columns(self) -> dict[str, Rows]:
        """Query: every column, [rows]."""
        chunks = [*self._full, self._chunk[: self._used]]
        return {
            name: np.concatenate([chunk[:, index] for chunk in chunks])
            for index, name in enumerate(self.columns)
        }


@dataclass(slots=True)
class StepEnd:
    """When a replica's last step ended: the last token time of its steady decodes."""

    time_ns: int = 0


class TokenClock:
    """First tokens, finishes and inter-token gaps of each request, by the end times of steps.

    A gap is the time between two chunks of tokens that reach the user, as benchmark clients measure it; a
    verify step's tokens are one chunk.
    """

    def __init__(self, num_requests: int) -> None:
        self.admitted_ns = np.full(num_requests, -1, np.int64)
        self.first_token_ns = np.full(num_requests, -1, np.int64)
        self.finish_ns = np.full(num_requests, -1, np.int64)
        self.output_tokens = np.zeros(num_requests, np.int64)
        self.hit_tokens = np.zeros(num_requests, np.int64)
        self.num_preemptions = np.zeros(num_requests, np.int64)
        self._last_ns: dict[int, int] = {}
        self._gaps: dict[int, int] = {}

    def tokens(self, completion: Completion, last_end: StepEnd, now_ns: int) -> None:
        """A step's tokens came back."""
        last, gaps = self._last_ns, self._gaps
        if completion.steady:
            gap = now_ns - last_end.time_ns
            gaps[gap] = gaps.get(gap, 0) + len(completion.steady)
        for request in completion.left:
            last[request.request_id] = last_end.time_ns
        for request, _ in completion.listed:
            row = request.request_id
            before = last.get(row)
            if before is None:
                self.first_token_ns[row] = now_ns
            else:
                gap = now_ns - before
                gaps[gap] = gaps.get(gap, 0) + 1
            last[row] = now_ns
        for request in completion.finished:
            row = request.request_id
            self.finish_ns[row] = now_ns
            self.output_tokens[row] = request.output_tokens
            self.num_preemptions[row] = request.num_preemptions
            self.hit_tokens[row] = request.hit_tokens or 0
            del last[row]
        last_end.time_ns = now_ns

    def stretch(self, num_steady: int, last_end: StepEnd, ends_ns: NDArray[np.int64]) -> None:
        """So many steady decodes gained one token at each of these times."""
        gaps, before = self._gaps, last_end.time_ns
        for end in ends_ns.tolist():
            gap = end - before
            gaps[gap] = gaps.get(gap, 0) + num_steady
            before = end
        last_end.time_ns = before

    def gap_weights(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(gap_ns, weight), sorted by gap."""
        gaps = np.array(sorted(self._gaps), np.int64)
        return gaps, np.array([self._gaps[int(gap)] for gap in gaps], np.int64)
