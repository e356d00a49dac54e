"""JSON lines: one object a line, each line answered for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .builder import BadRow, Builder
from .errors import TraceError
from .files import line_batches
from .rows import MAX_STAMP_NS, MAX_TOKENS, Chunk

Row = dict[str, Any]
NO_LINES = (
    "is one JSON value, not one object a line: rewrite it (jq -c '.[]' for a list, jq -c . for an object)"
)
NS_PER = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def parse_object(line: bytes) -> Row:
    """One line as an object. Raises BadRow on anything else: broken JSON, bad UTF-8, NaN, other types."""
    try:
        value = _decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", str(error)[:120]) from None
    if type(value) is not dict:
        raise BadRow("not a JSON object", f"a {type(value).__name__}")
    return value


def read_jsonl(
    path: Path, builder: Builder, row: Callable[[int, Row], None], take: Callable[[], Chunk] | None = None
) -> Iterator[Chunk]:
    """Chunks of a file: `row(line, object)` adds to the builder or raises BadRow."""
    take = take or builder.take
    number = 0
    for lines in line_batches(path):
        for text in lines:
            number += 1
            if number == 1 and text.removeprefix(b"\xef\xbb\xbf").strip()[:1] == b"[":
                raise TraceError(NO_LINES, path=path)
            if not text or text.isspace():
                builder.num_blank += 1
                continue
            try:
                row(number, parse_object(text))
            except BadRow as bad:
                builder.reject(number, bad)
        yield take()


def tokens(row: Row, key: str) -> int:
    """A token count: a whole number, also as a string or a whole float. Raises BadRow."""
    value = row.get(key)
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    number = _number(value, key)
    if number != int(number):
        raise BadRow(f"unreadable {key}", f"{value!r} is not whole")
    if number < 0:
        raise BadRow(f"negative {key}", repr(value))
    if number > MAX_TOKENS:
        raise BadRow(f"implausible {key}", f"{value!r} is above {MAX_TOKENS:,}")
    return int(number)


def stamp_ns(row: Row, key: str, unit: str) -> int:
    """A numeric stamp in exact nanoseconds. Raises BadRow where it is missing, not finite or out of range."""
    value = row.get(key)
    number = value if type(value) is int else _number(value, key)
    ns = number * NS_PER[unit] if type(number) is int else round(float(number) * NS_PER[unit])
    if abs(ns) > MAX_STAMP_NS:
        raise BadRow(f"implausible {key}", f"{str(value)[:40]} {unit}")
    return int(ns)


def seconds(row: Row, key: str) -> float | None:
    """An optional duration in seconds: None where absent or null. Raises BadRow where unreadable."""
    value = row.get(key)
    return None if value is None else float(_number(value, key))


def _number(value: object, key: str) -> float | int:
    if value is None or value == "":
        raise BadRow(f"no {key}")
    if type(value) is int:
        number: float | int = value
    elif type(value) is float:
        number = value
    elif type(value) is str and len(value) <= 40 and "_" not in value:
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                raise BadRow(f"unreadable {key}", repr(value)) from None
    else:
        raise BadRow(f"unreadable {key}", repr(value)[:60])
    if type(number) is float and not math.isfinite(number):
        raise BadRow(f"unreadable {key}", repr(value))
    return number


def id_list(row: Row, key: str = "hash_ids") -> list[int]:
    """The block ids, elements unchecked (`Builder.add` does that). Raises BadRow where it is no list."""
    value = row.get(key)
    if type(value) is not list:
        raise BadRow(f"unreadable {key}", f"a list is expected, found {type(value).__name__}")
    return value
