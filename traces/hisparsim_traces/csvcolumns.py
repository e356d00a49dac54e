"""Text columns to numbers and stamps: every cell that cannot be read is answered for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .csvbatches import Batch
from .jsonl import NS_PER
from .rows import MAX_STAMP_NS, MAX_TOKENS, NO_STAMP, Chunk, Rejected
from .trace import Ints

Bools = NDArray[np.bool_]


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


def chunk_of(batch: Batch, good: Bools, time_ns: Ints, given: Parsed, made: Parsed) -> Chunk:
    """The good rows of a batch, with what was rejected. [n] -> [good.sum()]"""
    return Chunk(
        line=batch.line[good],
        time_ns=time_ns[good],
        input_tokens=given.values[good],
        output_tokens=made.values[good],
        rejected=batch.rejected,
        num_blank=batch.num_blank,
    )
