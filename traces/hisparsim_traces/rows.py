"""What a format's reader hands over: chunks of parsed rows, in file order, and the rows it could not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .kinds import Kinds
from .trace import Floats, Ints

NO_STAMP = np.iinfo(np.int64).min
MAX_TOKENS = 10**9  # no prompt or output is longer; larger figures are damage, and would overflow sums
MAX_STAMP_NS = 9_000_000_000_000_000_000  # int64 nanoseconds: epoch stamps until 2255


@dataclass(frozen=True)
class Rejected:
    """A row that was read and cannot be used."""

    line: int
    reason: str
    detail: str

    def refuse(self, what: str, path: Path) -> NoReturn:
        """Raise the TraceError of strict loading, under which such a row is not `what` (dropped, changed)."""
        detail = f" ({self.detail})" if self.detail else ""
        raise TraceError(
            f"{self.reason}{detail}: the row would be {what}, which strict loading refuses",
            path=path,
            line=self.line,
        )


@dataclass
class Chunk:
    """Parsed rows. `parent` counts parsed rows of the whole file from 0, -1 = none.

    `time_ns` is exact, at the source's own origin; NO_STAMP where a dependent row has none.
    `block_ids` [sum(block_counts)] are scoped: equal only where the source means the same content.
    """

    line: Ints
    time_ns: Ints
    input_tokens: Ints
    output_tokens: Ints
    session: Ints | None = None
    turn: Ints | None = None
    parent: Ints | None = None
    think_s: Floats | None = None
    shared_prefix_tokens: Ints | None = None
    block_counts: Ints | None = None
    block_ids: NDArray[np.uint64] | None = None
    rejected: list[Rejected] = field(default_factory=list)
    changed: list[Rejected] = field(default_factory=list)
    num_blank: int = 0
    notes: tuple[str, ...] = ()
    block_tokens: int | None = None
    kind: Kinds | None = None

    def __len__(self) -> int:
        return len(self.line)

    def first(self, n: int) -> Chunk:
        """The first n rows, with what was rejected or changed up to the last of them."""
        if n >= len(self):
            return self
        last = int(self.line[n - 1]) if n else 0
        blocks = None if self.block_counts is None else int(self.block_counts[:n].sum())
        return replace(
            self,
            line=self.line[:n],
            time_ns=self.time_ns[:n],
            input_tokens=self.input_tokens[:n],
            output_tokens=self.output_tokens[:n],
            session=None if self.session is None else self.session[:n],
            turn=None if self.turn is None else self.turn[:n],
            parent=None if self.parent is None else self.parent[:n],
            think_s=None if self.think_s is None else self.think_s[:n],
            shared_prefix_tokens=None if self.shared_prefix_tokens is None else self.shared_prefix_tokens[:n],
            block_counts=None if self.block_counts is None else self.block_counts[:n],
            block_ids=None if self.block_ids is None else self.block_ids[:blocks],
            kind=None if self.kind is None else self.kind.take(slice(0, n)),
            rejected=[r for r in self.rejected if r.line <= last],
            changed=[r for r in self.changed if r.line <= last],
        )


@dataclass(frozen=True)
class Options:
    """What a reader may be told. Each format takes what it knows and refuses the rest.

    Attributes:
        columns: own column names and units, for the plain formats: {"arrival": "ts:ms", "input_tokens":
            "isl"}.
        block_tokens: tokens a block id covers, where the format leaves it open.
        seed: for formats that describe clients rather than requests (ServeGen).
        duration_s: how much of such a description is drawn, None = all.
        time_unit: "s" | "ms" | "us" | "ns", for the one format that leaves its unit open (timed_trace).
    """

    columns: Mapping[str, str] | None = None
    block_tokens: int | None = None
    seed: int | None = None
    duration_s: float | None = None
    time_unit: str | None = None

    def given(self) -> set[str]:
        return {name for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Head:
    """The beginning of a file, taken apart as far as detection needs.

    Attributes:
        kind: "csv", "json" or "parquet".
        header: the first line's fields, for "csv".
        keys: the first object's keys, for "json".
        rows: the complete objects among the first lines, at most 32.
        raw: the sampled bytes.
        whole: the file begins as one JSON value, a list or an object over several lines.
    """

    path: Path
    kind: str
    header: tuple[str, ...]
    keys: frozenset[str]
    rows: tuple[Mapping[str, object], ...]
    raw: bytes
    whole: bool = False

    @property
    def first(self) -> Mapping[str, object]:
        """The first object; empty where it is larger than the sample."""
        return self.rows[0] if self.rows else {}


class ReadRows(Protocol):
    def __call__(self, path: Path, options: Options) -> Iterator[Chunk]: ...


class Recognise(Protocol):
    def __call__(self, head: Head) -> bool: ...


@dataclass(frozen=True)
class Format:
    """A named format.

    Attributes:
        recognise: whether a file's beginning is this format; every recogniser is asked, two answers are an
            error.
        block_rule: "ceil": the partial last block has an id; "floor": it has none (one more is cut off);
            "given": whatever stands there; None: the format has no ids.
        takes: the names of the Options it understands.
        sessions_whole: ids and sessions are files' own, so a folder of files may be read as one trace.
        pattern: which files of such a folder.
        own_clocks: every session has a clock of its own, so stamps that go back are no inversions.
    """

    name: str
    title: str
    read: ReadRows
    recognise: Recognise
    block_rule: str | None = None
    takes: frozenset[str] = frozenset()
    sessions_whole: bool = False
    pattern: str = "*"
    own_clocks: bool = False
