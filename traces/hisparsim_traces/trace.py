"""The request model: a trace as columns, one row a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .kinds import Kinds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = slice | NDArray[np.bool_] | NDArray[np.int64]


@dataclass(frozen=True)
class Offered:
    """The arrivals as recorded, rows of zero tokens included: failed requests arrived too."""

    num_requests: int
    span_s: float
    interarrival_cv: float | None


@dataclass(frozen=True)
class LoadReport:
    """What happened to the rows of a file. `rows_read == rows_kept + sum(rows_dropped.values())`."""

    rows_read: int
    rows_kept: int
    rows_dropped: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    inversions: int = 0
    ties: int = 0
    notes: tuple[str, ...] = ()
    offered: Offered | None = None

    def __post_init__(self) -> None:
        if self.rows_read != self.rows_kept + sum(self.rows_dropped.values()):
            raise TraceError(
                f"load report does not add up: {self.rows_read} rows read, {self.rows_kept} kept, "
                f"{sum(self.rows_dropped.values())} dropped"
            )


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as columns, one row a request, in file order after a stable sort by arrival.

    A turn without a stamp of its own sorts with its parent, behind it.

    Attributes:
        name: file stem or bundled name.
        format: "mooncake", "azure2023", ..., "synthetic".
        sha256: of the file's bytes as stored; of the canonical columns for synthetic ones.
        arrival_s: [n] seconds from the first kept request. A row with a parent carries its original stamp
            where the source has one, else NaN.
        input_tokens: [n] the whole prompt (cumulative for turns).
        output_tokens: [n] tokens generated.
        session: [n] dense session number, -1 = no session.
        turn: [n] 0-based turn within the session.
        parent: [n] row that must have finished before this one may start, -1 = none. Parents stand earlier.
        think_s: [n] seconds between the parent's end and this arrival, NaN where unknown or no parent.
        shared_prefix_tokens: [n] leading tokens equal to the parent's context (its prompt and its output);
            0 without a parent, or where block ids say it better.
        block_tokens: tokens covered by one block id, None without ids.
        block_offsets: [n+1] into block_ids.
        block_ids: dense ids; equal id means equal content after an equal prefix.
        source_line: [n] 1-based line or record number.
        loading: what was read, dropped and changed.
        kind: what kind of request each row is, in the source's words; None where the source has none.
    """

    name: str
    format: str
    sha256: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    session: Ints
    turn: Ints
    parent: Ints
    think_s: Floats
    shared_prefix_tokens: Ints
    block_tokens: int | None
    block_offsets: Ints
    block_ids: Ints
    source_line: Ints
    loading: LoadReport
    kind: Kinds | None = None

    @property
    def num_requests(self) -> int:
        return len(self.input_tokens)

    @property
    def num_sessions(self) -> int:
        return int(self.session.max()) + 1 if self.num_requests else 0

    @property
    def sum_input_tokens(self) -> int:
        return int(self.input_tokens.sum())

    @property
    def sum_output_tokens(self) -> int:
        return int(self.output_tokens.sum())

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last known arrival; 0 for fewer than two."""
        known = self.arrival_s[~np.isnan(self.arrival_s)]
        return float(known.max() - known.min()) if len(known) else 0.0

    def blocks(self, row: int) -> Ints:
        """The block ids of one request, [num_blocks]."""
        return self.block_ids[self.block_offsets[row] : self.block_offsets[row + 1]]

    def select(self, rows: Rows) -> Trace:
        """A trace of some rows, in their order here; arrivals start again at the first kept.

        A row whose parent is left out depends on its nearest kept ancestor (sharing no more than the whole
        chain shares); with none left it becomes an arrival of its own, at its ancestor's stamp if it has
        none. Its think time is then unknown (NaN). Sessions are numbered again in order of appearance.
        """
        from .selecting import select_rows

        return select_rows(self, rows)

    def head(self, n: int) -> Trace:
        """The first n requests."""
        return self.select(slice(0, n))

    def scaled(self, time_scale: float) -> Trace:
        """Arrivals and think times multiplied by `time_scale` (2.0 = half the rate)."""
        if not (time_scale > 0 and np.isfinite(time_scale)):
            raise TraceError(
                f"time scale {time_scale}: must be a finite number above 0; 0.5 doubles the rate"
            )
        return replace(self, arrival_s=self.arrival_s * time_scale, think_s=self.think_s * time_scale)

    def check(self, *, allow_zero_tokens: bool = False) -> None:
        """Raise TraceError on the first broken invariant; changes nothing."""
        from .selecting import check_trace

        check_trace(self, allow_zero_tokens)


def offered(arrival_s: Floats) -> Offered:
    """The recorded arrivals, dropped rows included."""
    known = np.sort(arrival_s[~np.isnan(arrival_s)])
    gaps = np.diff(known)
    cv = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None
    return Offered(len(arrival_s), float(known[-1] - known[0]) if len(known) else 0.0, cv)


def no_blocks(n: int) -> tuple[None, Ints, Ints]:
    """(block_tokens, block_offsets, block_ids) of n requests without block ids."""
    return None, np.zeros(n + 1, np.int64), np.zeros(0, np.int64)


def columns_sha256(trace: Trace) -> str:
    """sha256 of the columns as little-endian bytes, in a fixed order; name and report are left out."""
    digest = hashlib.sha256(str(trace.block_tokens).encode())
    for column in (
        trace.arrival_s,
        trace.input_tokens,
        trace.output_tokens,
        trace.session,
        trace.turn,
        trace.parent,
        trace.think_s,
        trace.shared_prefix_tokens,
        trace.block_offsets,
        trace.block_ids,
    ):
        digest.update(np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).tobytes())
    if trace.kind is not None:
        digest.update("\n".join(trace.kind.names).encode() + trace.kind.codes.astype("<i2").tobytes())
    return digest.hexdigest()
