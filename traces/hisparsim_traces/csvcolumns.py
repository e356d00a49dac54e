"""CSV in columns: pyarrow splits and converts, every row that does not fit is named with its line."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .files import open_bytes, read_some
from .jsonl import NS_PER
from .rows import MAX_STAMP_NS, MAX_TOKENS, NO_STAMP, Rejected
from .trace import Ints

BLOCK_BYTES = 1 << 20
Bools = NDArray[np.bool_]


@dataclass
class Batch:
    """Rows with the right number of fields, as text columns, and those without."""

    line: Ints
    columns: dict[str, Any]  # name -> pyarrow string array
    rejected: list[Rejected]
    num_blank: int


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


@dataclass
class Parsed:
    """A column's values; `good` marks the rows that could be read."""

    values: Ints
    good: Bools
    reason: dict[int, tuple[str, str]]  # row -> (reason, detail), for the rows that could not


def _as_whole(column: Any) -> Any:
    """Text as int64, or pyarrow.ArrowInvalid. pyarrow would read 0x1f as 31, which no trace means."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.any(pc.match_substring(column, "x", ignore_case=True)).as_py():
        raise pa.ArrowInvalid("hexadecimal")
    return pc.cast(column, pa.int64())


def token_column(column: Any, name: str) -> Parsed:
    """Token counts: whole numbers from 0, also written as whole floats. [n]"""
    import pyarrow as pa

    try:
        values = np.asarray(_as_whole(column), dtype=np.int64)
        good = np.ones(len(values), bool)
        reason: dict[int, tuple[str, str]] = {}
    except pa.ArrowInvalid:
        values, good, reason = _slow(column, name, _whole)
    for index in np.flatnonzero(good & ((values < 0) | (values > MAX_TOKENS))):
        what = "negative" if values[index] < 0 else "implausible"
        reason[int(index)] = (f"{what} {name}", f"{values[index]}")
        good[index] = False
    return Parsed(values, good, reason)


def number_column_ns(column: Any, name: str, unit: str) -> Parsed:
    """Numeric stamps in `unit`, as exact nanoseconds. [n]"""
    import pyarrow as pa
    import pyarrow.compute as pc

    scale = NS_PER[unit]
    looks_whole = not len(column) or "." not in column[0].as_py()
    try:
        numbers: Any = np.asarray(_as_whole(column) if looks_whole else pc.cast(column, pa.float64()))
    except pa.ArrowInvalid:
        numbers = np.array([np.inf])
    if np.isfinite(numbers).all() and (not len(numbers) or np.abs(numbers).max() <= MAX_STAMP_NS / scale):
        exact = numbers * scale if numbers.dtype == np.int64 else np.rint(numbers * scale)
        return Parsed(exact.astype(np.int64), np.ones(len(numbers), bool), {})
    return Parsed(*_slow(column, name, lambda text: _scaled(text, scale)))


def datetime_column_ns(column: Any, name: str) -> Parsed:
    """Wall-clock stamps: naive or with Z or an offset, 0 to 9 fractional digits, `T` or a space. Naive is
    UTC. [n]
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def cast(part: Any, zoned: bool) -> Any:
        kind = pa.timestamp("ns", "UTC") if zoned else pa.timestamp("ns")
        return np.asarray(pc.cast(pc.cast(part, kind), pa.int64()), dtype=np.int64)

    has_zone = np.asarray(pc.match_substring_regex(column, r"(Z|[+-]\d\d(:?\d\d)?)$"))
    # a bare date ends in -dd, which looks like an offset
    has_zone &= np.asarray(pc.greater(pc.utf8_length(column), 10))
    values = np.full(len(column), NO_STAMP, np.int64)
    try:
        for zoned in (False, True):
            rows = has_zone == zoned
            if rows.all():
                values = cast(column, zoned)
            elif rows.any():
                values[rows] = cast(column.filter(pa.array(rows)), zoned)
    except pa.ArrowInvalid:
        return Parsed(*_slow(column, name, lambda text: _moment(text, cast)))
    return Parsed(values, np.ones(len(values), bool), {})


def _slow(column: Any, name: str, parse: Any) -> tuple[Ints, Bools, dict[int, tuple[str, str]]]:
    values = np.zeros(len(column), np.int64)
    good = np.ones(len(column), bool)
    reason: dict[int, tuple[str, str]] = {}
    for index, text in enumerate(column.to_pylist()):
        try:
            values[index] = parse(text.strip())
        except (ValueError, OverflowError):
            good[index] = False
            reason[index] = (f"unreadable {name}" if text.strip() else f"no {name}", repr(text)[:60])
    return values, good, reason


def _whole(text: str) -> int:
    number = float(text) if "_" not in text else float("nan")
    if number != int(number) or abs(number) > 2**62:
        raise ValueError
    return int(number)


def _scaled(text: str, scale: int) -> int:
    try:
        ns = int(text) * scale
    except ValueError:
        ns = round(float(text) * scale)
    if "_" in text or abs(ns) > MAX_STAMP_NS:
        raise ValueError
    return ns


def _moment(text: str, cast: Any) -> int:
    import pyarrow as pa

    zoned = text.endswith("Z") or (len(text) > 10 and any(sign in text[-6:] for sign in "+-"))
    try:
        return int(cast(pa.array([text]), zoned)[0])
    except pa.ArrowInvalid:
        raise ValueError from None


def usable(batch: Batch, *parsed: Parsed) -> Bools:
    """Rows every column of which could be read; the others join the batch's rejected rows. [n]"""
    good = np.ones(len(batch.line), bool)
    for column in parsed:
        for index in np.flatnonzero(good & ~column.good):
            batch.rejected.append(Rejected(int(batch.line[index]), *column.reason[int(index)]))
        good &= column.good
    return good
