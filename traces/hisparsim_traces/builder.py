"""Rows collected one by one, for readers that cannot work on columns."""

from __future__ import annotations

from array import array

import numpy as np

from .kinds import KindBook
from .rows import Chunk, Rejected


class BadRow(Exception):
    """Raised inside a reader for the row at hand; becomes a Rejected."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class Builder:
    """Collects rows one by one for readers that cannot work on columns."""

    def __init__(self, *, blocks: bool = False, sessions: bool = False, kinds: bool = False) -> None:
        self.num_rows = 0  # of the whole file
        self._blocks = blocks
        self._sessions = sessions
        self._kinds = KindBook() if kinds else None
        self._clear()

    def _clear(self) -> None:
        self.line: list[int] = []
        self.time_ns: list[int] = []
        self.input_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.session: list[int] = []
        self.turn: list[int] = []
        self.parent: list[int] = []
        self.think_s: list[float] = []
        self.shared: list[int] = []
        self.kind: array[int] = array("h")
        self.block_counts: list[int] = []
        self.block_ids: array[int] = array("Q")
        self.rejected: list[Rejected] = []
        self.changed: list[Rejected] = []
        self.num_blank = 0

    def __len__(self) -> int:
        return len(self.line)

    def add(
        self,
        line: int,
        time_ns: int,
        input_tokens: int,
        output_tokens: int,
        ids: list[int] | None = None,
        *,
        session: int = -1,
        turn: int = 0,
        parent: int = -1,
        think_s: float = float("nan"),
        shared: int = 0,
        kind: object = None,
    ) -> int:
        """Append a row and return its number within the file. On a bad id raises BadRow and adds nothing."""
        if self._blocks:
            before = len(self.block_ids)
            try:
                self.block_ids.extend(ids or [])
            except (TypeError, OverflowError):
                del self.block_ids[before:]
                raise BadRow("unreadable hash_ids", "ids are whole numbers from 0 to 2^64 - 1") from None
            self.block_counts.append(len(self.block_ids) - before)
        self.line.append(line)
        self.time_ns.append(time_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        if self._sessions:
            self.session.append(session)
            self.turn.append(turn)
            self.parent.append(parent)
            self.think_s.append(think_s)
            self.shared.append(shared)
        if self._kinds is not None:
            self.kind.append(self._kinds.code(kind))
        self.num_rows += 1
        return self.num_rows - 1

    def reject(self, line: int, bad: BadRow) -> None:
        self.rejected.append(Rejected(line, bad.reason, bad.detail))

    def change(self, line: int, reason: str, detail: str = "") -> None:
        self.changed.append(Rejected(line, reason, detail))

    def take(self, *, block_tokens: int | None = None, notes: tuple[str, ...] = ()) -> Chunk:
        """The rows since the last take, as a chunk; the builder starts again empty."""
        chunk = Chunk(
            line=np.array(self.line, np.int64),
            time_ns=np.array(self.time_ns, np.int64),
            input_tokens=np.array(self.input_tokens, np.int64),
            output_tokens=np.array(self.output_tokens, np.int64),
            rejected=self.rejected,
            changed=self.changed,
            num_blank=self.num_blank,
            notes=notes,
            block_tokens=block_tokens,
        )
        if self._sessions:
            chunk.session = np.array(self.session, np.int64)
            chunk.turn = np.array(self.turn, np.int64)
            chunk.parent = np.array(self.parent, np.int64)
            chunk.think_s = np.array(self.think_s, np.float64)
            chunk.shared_prefix_tokens = np.array(self.shared, np.int64)
        if self._blocks:
            chunk.block_counts = np.array(self.block_counts, np.int64)
            chunk.block_ids = np.frombuffer(self.block_ids.tobytes(), np.uint64)
        if self._kinds is not None:
            chunk.kind = self._kinds.kinds(np.frombuffer(self.kind.tobytes(), np.int16))
        self._clear()
        return chunk
