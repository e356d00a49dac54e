"""Recorded top-k selections in a compact file: which positions each layer group read, step by step.

Layout: the magic, one JSON line (what is recorded), then frames. A frame is its payload's length (u32,
little-endian) and a zlib payload: a JSON line with the number of records and the width of each column, then
the columns step, group, request, context, count (differences to the record before) and positions (ascending
within a record, each the difference to the one before, the first to -1, less 1), in the narrowest of 1, 2,
4 or 8 bytes. A frame of length 0, and the number of records as u64, end the file, so a cut file is known
for what it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import TraceError
from .files import open_raw
from .trace import Ints

MAGIC = b"hisparsim-topk 1\n"
_FRAME_POSITIONS = 1 << 20
_MAX_FRAME_BYTES = 1 << 28
_COLUMNS = ("step", "group", "request", "context", "count")


@dataclass(frozen=True, eq=False)
class Selections:
    """A batch of records.

    Attributes:
        step: [n] decode step, counted by the recorder.
        group: [n] layer group that shares one selection.
        request: [n] request number.
        context: [n] tokens of context at that step; positions lie below it.
        offsets: [n+1] into positions.
        positions: [sum] ascending within a record.
    """

    step: Ints
    group: Ints
    request: Ints
    context: Ints
    offsets: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.step)

    def selected(self, record: int) -> Ints:
        return self.positions[self.offsets[record] : self.offsets[record + 1]]


class TopkWriter:
    """Writes selections; use it as a context manager. A file without its end is refused by the reader.

    Args:
        path: the file, made anew.
        top_k: how many positions a full selection has.
        num_groups: layer groups that are recorded.
        about: what else is to be known: model, source, seed; plain JSON values.
    """

    def __init__(
        self, path: str | Path, *, top_k: int, num_groups: int, about: dict[str, Any] | None = None
    ) -> None:
        if top_k < 1 or num_groups < 1:
            raise TraceError(f"top_k {top_k} and num_groups {num_groups}: both must be at least 1")
        self.top_k = top_k
        self.num_groups = num_groups
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115 -- closed by close()
        head = {"top_k": top_k, "num_groups": num_groups, "about": about or {}}
        self._file.write(MAGIC + json.dumps(head).encode() + b"\n")
        self._records: list[tuple[int, int, int, int, int]] = []
        self._positions: list[Ints] = []
        self._held = 0
        self._written = 0

    def append(self, step: int, group: int, request: int, context: int, positions: ArrayLike) -> None:
        """Record one selection. Raises TraceError where it breaks a rule of the format."""
        chosen = np.asarray(positions, np.int64)
        where = f"step {step}, group {group}, request {request}"
        if min(step, request) < 0 or not 0 <= group < self.num_groups:
            raise TraceError(f"{where}: step and request from 0, group below {self.num_groups}")
        if chosen.ndim != 1 or len(chosen) > self.top_k:
            raise TraceError(f"{where}: {chosen.size} positions, at most top_k {self.top_k} in one row")
        if len(chosen) and (chosen[0] < 0 or chosen[-1] >= context or (np.diff(chosen) <= 0).any()):
            raise TraceError(f"{where}: positions must ascend, from 0 to below the context of {context}")
        self._records.append((step, group, request, context, len(chosen)))
        self._positions.append(chosen)
        self._held += len(chosen)
        if self._held >= _FRAME_POSITIONS or len(self._records) >= _FRAME_POSITIONS:
            self._flush()

    def _flush(self) -> None:
        if not self._records:
            return
        table = np.array(self._records, np.int64)
        columns = [np.diff(table[:, k], prepend=0) for k in range(len(_COLUMNS))]
        gaps = [np.diff(chosen, prepend=-1) - 1 for chosen in self._positions]
        packed = [_narrow(column) for column in [*columns, np.concatenate(gaps)]]
        head = json.dumps({"records": len(table), "types": [column.dtype.str for column in packed]}).encode()
        payload = zlib.compress(head + b"\n" + b"".join(column.tobytes() for column in packed), 6)
        self._file.write(len(payload).to_bytes(4, "little") + payload)
        self._written += len(table)
        self._records, self._positions, self._held = [], [], 0

    def close(self) -> None:
        """Write the end and close the file."""
        if not self._file.closed:
            self._flush()
            self._file.write((0).to_bytes(4, "little") + self._written.to_bytes(8, "little"))
            self._file.close()

    def __enter__(self) -> TopkWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # without its end the file is known to be unfinished
            self._file.close()


def _narrow(column: Ints) -> np.ndarray[tuple[int], np.dtype[Any]]:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for kind in ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4"):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return column.astype(kind)
    return column.astype("<i8")


@dataclass(frozen=True)
class TopkHead:
    top_k: int
    num_groups: int
    about: dict[str, Any]


class TopkReader:
    """Reads a file of selections, batch by batch. Iterating again starts over.

    Raises:
        TraceError: at construction where it is no such file, while iterating where it is cut or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._open() as file:
            self.head = self._read_head(file)

    def _open(self) -> IO[bytes]:
        return open_raw(self.path)

    def _read_head(self, file: IO[bytes]) -> TopkHead:
        if file.read(len(MAGIC)) != MAGIC:
            raise TraceError("is no file of top-k selections of version 1", path=self.path)
        try:
            head = json.loads(file.readline(1 << 20))
            top_k, num_groups, about = int(head["top_k"]), int(head["num_groups"]), dict(head["about"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError("has a damaged head", path=self.path) from error
        if top_k < 1 or num_groups < 1:
            raise TraceError("has a damaged head", path=self.path)
        return TopkHead(top_k, num_groups, about)

    def __iter__(self) -> Iterator[Selections]:
        with self._open() as file:
            self._read_head(file)
            num_records = 0
            while True:
                length = int.from_bytes(self._exactly(file, 4), "little")
                if not length:
                    if int.from_bytes(self._exactly(file, 8), "little") != num_records or file.read(1):
                        raise TraceError("does not hold the records its end counts", path=self.path)
                    return
                if length > _MAX_FRAME_BYTES:
                    raise TraceError("has a damaged frame", path=self.path)
                batch = self._frame(self._exactly(file, length))
                num_records += len(batch)
                yield batch

    def _exactly(self, file: IO[bytes], size: int) -> bytes:
        data = file.read(size)
        if len(data) != size:
            raise TraceError("is cut short: its writer was not closed", path=self.path)
        return data

    def _frame(self, payload: bytes) -> Selections:
        try:
            head, _, body = zlib.decompress(payload).partition(b"\n")
            about = json.loads(head)
            n, kinds = int(about["records"]), [np.dtype(kind) for kind in about["types"]]
            if n < 1 or len(kinds) != len(_COLUMNS) + 1 or any(kind.kind not in "iu" for kind in kinds):
                raise ValueError("columns")
            at = 0
            columns: list[Ints] = []
            for kind in kinds[:-1]:
                columns.append(np.cumsum(np.frombuffer(body, kind, n, at), dtype=np.int64))
                at += n * kind.itemsize
            gaps = np.frombuffer(body, kinds[-1], -1, at).astype(np.int64)
            return self._checked(columns, gaps)
        except (ValueError, KeyError, TypeError, zlib.error, RecursionError, MemoryError) as error:
            raise TraceError(f"has a damaged frame ({str(error)[:80]})", path=self.path) from error

    def _checked(self, columns: list[Ints], gaps: Ints) -> Selections:
        step, group, request, context, count = columns
        if (count < 0).any() or (count > self.head.top_k).any() or int(count.sum()) != len(gaps):
            raise ValueError("counts")
        offsets = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        if (gaps < 0).any() or min(step.min(), request.min(), group.min()) < 0:
            raise ValueError("negative values")
        running = np.concatenate([[0], np.cumsum(gaps + 1)])
        positions = running[1:] - np.repeat(running[offsets[:-1]], count) - 1
        if len(positions) and (positions >= np.repeat(context, count)).any():
            raise ValueError("positions beyond the context")
        if group.max() >= self.head.num_groups:
            raise ValueError("groups")
        return Selections(step, group, request, context, offsets, positions)


def write_selections(path: str | Path, batches: Sequence[Selections], *, top_k: int, num_groups: int) -> None:
    """Write whole batches."""
    with TopkWriter(path, top_k=top_k, num_groups=num_groups) as writer:
        for batch in batches:
            for record in range(len(batch)):
                writer.append(
                    int(batch.step[record]),
                    int(batch.group[record]),
                    int(batch.request[record]),
                    int(batch.context[record]),
                    batch.selected(record),
                )
