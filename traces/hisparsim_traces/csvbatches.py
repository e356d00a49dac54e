"""CSV in batches of columns: pyarrow splits, every row of a wrong length is named with its line."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .files import open_bytes, read_some
from .rows import Rejected
from .trace import Ints

BLOCK_BYTES = 1 << 20


@dataclass
class Batch:
    """Rows with the right number of fields, as text columns, and those without."""

    line: Ints
    columns: dict[str, Any]  # name -> pyarrow string array
    rejected: list[Rejected]
    num_blank: int

    def require(self, names: Sequence[str], path: Path, advice: str = "name another format") -> None:
        """Raise TraceError where a column is missing; changes nothing."""
        for name in names:
            if name not in self.columns:
                found = ", ".join(self.columns)[:300]
                raise TraceError(f"has no column {name!r} (found {found}): {advice}", path=path)


def header_of(raw: bytes) -> tuple[str, ...]:
    """Field names of the first line, stripped of quotes, spaces and a byte-order mark."""
    first = re.split(rb"[\r\n]", raw.removeprefix(b"\xef\xbb\xbf"), maxsplit=1)[0]
    text = first.decode("utf-8", "replace")
    return tuple(name.strip().strip('"').strip() for name in text.split(","))


def csv_batches(path: Path, *, names: list[str] | None = None) -> Iterator[Batch]:
    """Batches of a comma-separated file with a header line (or, with `names`, without one).

    A quoted value may run over several lines; its record counts as one, and lines are numbered by record.
    Raises TraceError where the file as a whole is not CSV: a line above a MiB, or lines swallowed by a quote
    that is never closed.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    bad: list[Any] = []

    def keep_invalid(row: Any) -> str:
        bad.append(row)
        return "skip"

    def wrong_length(row: Any) -> Rejected:
        detail = f"{row.actual_columns}, not {len(header)}"
        return Rejected(int(row.number), "wrong number of fields", detail)

    with open_bytes(path) as stream:
        first = read_some(stream, 1 << 16, path)
    if not first.strip():
        raise TraceError("is empty", path=path)
    header = list(names) if names else list(header_of(first))
    if not names and len(first.splitlines()) == 1 and len(first) < 1 << 16:
        raise TraceError("holds a header and no row", path=path)
    if len(set(header)) != len(header):
        raise TraceError("names a column twice in its header", path=path, line=1)
    try:
        with open_bytes(path) as stream:
            guarded = _Guarded(stream, path)
            reader = csv.open_csv(
                guarded,
                read_options=csv.ReadOptions(
                    use_threads=False,
                    block_size=BLOCK_BYTES,
                    column_names=header,
                    skip_rows=0 if names else 1,
                ),
                parse_options=csv.ParseOptions(
                    ignore_empty_lines=False, invalid_row_handler=keep_invalid, newlines_in_values=True
                ),
                convert_options=csv.ConvertOptions(
                    column_types={name: pa.string() for name in header}, strings_can_be_null=False
                ),
            )
            next_line = 1 if names else 2
            for batch in reader:
                skipped = sorted(int(row.number) for row in bad)
                line = _line_numbers(next_line, batch.num_rows, skipped)
                next_line = int(line[-1]) + 1 if len(line) else next_line
                rejected = [wrong_length(row) for row in bad if int(row.number) < next_line]
                bad[:] = [row for row in bad if int(row.number) >= next_line]
                columns = {name: batch.column(i) for i, name in enumerate(header)}
                blank = np.ones(batch.num_rows, bool)
                for column in columns.values():
                    blank &= np.asarray(pc.binary_length(column)) == 0
                    if not blank.any():
                        break
                if blank.any():
                    keep = pa.array(~blank)
                    columns = {name: column.filter(keep) for name, column in columns.items()}
                    line = line[~blank]
                yield Batch(line, columns, rejected, int(blank.sum()))
            left = [wrong_length(row) for row in bad]
            if guarded.num_quotes % 2 and guarded.num_lines > next_line - 1 + len(left):
                raise TraceError("has a quote that is never closed, which swallows lines", path=path)
            if left:
                nothing = {name: pa.array([], pa.string()) for name in header}
                yield Batch(np.zeros(0, np.int64), nothing, left, 0)
    except pa.ArrowInvalid as error:
        if "straddl" in str(error):
            raise TraceError(
                f"has a line above {BLOCK_BYTES >> 20} MiB, or a quote that is never closed", path=path
            ) from error
        raise TraceError(f"is not readable CSV ({str(error)[:200]})", path=path) from error


class _Guarded:
    """A stream whose decompression errors are TraceErrors; the methods pyarrow asks of a Python file.

    Bytes that are no UTF-8 become U+FFFD, so that they spoil their field and nothing else: pyarrow cannot
    report a row of the wrong length that holds them.
    """

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = b"\n"
        self.closed = False
        self.num_quotes = 0
        self.num_lines = 0  # the header included; "\r\n", "\n" and "\r" end one

    def read(self, size: int = -1) -> bytes:
        piece = self._counted(read_some(self._stream, size, self._path))
        if piece.isascii() and piece and not self._decoder.getstate()[0]:
            return piece
        text = self._decoder.decode(piece, final=not piece)
        while piece and not text:  # nothing but the beginning of a character
            piece = self._counted(read_some(self._stream, 1024, self._path))
            text = self._decoder.decode(piece, final=not piece)
        return text.encode()

    def _counted(self, piece: bytes) -> bytes:
        self.num_quotes += piece.count(b'"')
        self.num_lines += piece.count(b"\n")
        if b"\r" in piece or self._last == b"\r":
            self.num_lines += piece.count(b"\r") - (self._last + piece).count(b"\r\n")
        if not piece and self._last not in b"\r\n":
            self.num_lines += 1  # the last line has no end
            self._last = b"\n"
        self._last = piece[-1:] or self._last
        return piece

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def _line_numbers(start: int, count: int, skipped: list[int]) -> Ints:
    """The next `count` line numbers from `start` that are not among the skipped. -> [count]"""
    gone = [number for number in skipped if number >= start]
    candidates = np.arange(start, start + count + len(gone), dtype=np.int64)
    if gone:
        candidates = candidates[~np.isin(candidates, np.array(gone))]
    return candidates[:count]
