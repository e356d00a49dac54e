"""Your own CSV, JSON lines or Parquet: any column names, any usual unit, told by a map.

The map goes from a field to "column" or "column:unit". Fields: arrival (units s, ms, us, ns, datetime; s
unless told), input_tokens and output_tokens (both needed), session, kind. Without an arrival all requests
wait from time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..builder import Builder
from ..csvbatches import Batch, csv_batches
from ..csvcolumns import chunk_of, datetime_column_ns, number_column_ns, token_column, usable
from ..errors import TraceError
from ..jsonl import NS_PER, Row, read_jsonl, stamp_ns, tokens
from ..kinds import KindBook
from ..rows import Chunk, Format, Head, Options
from .sessions import LastTurn, SessionBook

DEFAULT_MAP = {"arrival": "arrival_s", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}
_FIELDS = ("arrival", "input_tokens", "output_tokens", "session", "kind")


@dataclass(frozen=True)
class ColumnMap:
    """A checked map: the column of each field (None = not there) and the arrival's unit."""

    arrival: str | None
    input_tokens: str
    output_tokens: str
    session: str | None
    kind: str | None
    unit: str

    @classmethod
    def of(cls, given: Mapping[str, str] | None) -> ColumnMap:
        """Raises TraceError on an unknown field or unit, or a missing length."""
        columns = dict(DEFAULT_MAP if given is None else given)
        unknown = [name for name in columns if name not in _FIELDS]
        if unknown:
            raise TraceError(f"map field {unknown[0]!r}: one of {', '.join(_FIELDS)}, as in arrival=ts:ms")
        for name in ("input_tokens", "output_tokens"):
            if not columns.get(name):
                raise TraceError(f"the map names no column for {name}: add {name}=COLUMN")
        arrival, unit = columns.get("arrival"), "s"
        if arrival is not None and ":" in arrival:
            arrival, unit = arrival.rsplit(":", 1)
        if unit not in (*NS_PER, "datetime"):
            raise TraceError(f"unit {unit!r} of arrival: one of {', '.join(NS_PER)}, datetime")
        return cls(
            arrival,
            columns["input_tokens"],
            columns["output_tokens"],
            columns.get("session"),
            columns.get("kind"),
            unit,
        )

    @property
    def names(self) -> list[str]:
        """The columns that must be there."""
        every = (self.arrival, self.input_tokens, self.output_tokens, self.session, self.kind)
        return [name for name in every if name is not None]


def read_csv(path: Path, options: Options) -> Iterator[Chunk]:
    return _chunks(csv_batches(path), path, ColumnMap.of(options.columns))


def read_parquet(path: Path, options: Options) -> Iterator[Chunk]:
    return _chunks(_parquet_batches(path, ColumnMap.of(options.columns)), path, ColumnMap.of(options.columns))


def _parquet_batches(path: Path, columns: ColumnMap) -> Iterator[Batch]:
    """Row groups as text columns, so that one set of checks serves every plain format."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    wanted = list(dict.fromkeys(columns.names))
    try:
        file = pq.ParquetFile(path)
        missing = [name for name in wanted if name not in file.schema_arrow.names]
        if missing:
            found = ", ".join(file.schema_arrow.names)
            raise TraceError(f"has no column {missing[0]!r} (found {found}): say which with --map", path=path)
        line = 1
        for batch in file.iter_batches(batch_size=65_536, columns=wanted):
            texts = {
                name: pc.fill_null(pc.cast(batch.column(name), pa.string()), "")
                for name in batch.schema.names
            }
            yield Batch(np.arange(line, line + batch.num_rows), texts, [], 0)
            line += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"is not readable Parquet ({str(error)[:160]})", path=path) from error


def _chunks(batches: Iterator[Batch], path: Path, columns: ColumnMap) -> Iterator[Chunk]:
    book, kinds = SessionBook(), KindBook()
    for batch in batches:
        batch.require(columns.names, path, "say which with --map")
        given = token_column(batch.columns[columns.input_tokens], columns.input_tokens)
        made = token_column(batch.columns[columns.output_tokens], columns.output_tokens)
        if columns.arrival is None:
            good = usable(batch, given, made)
            time = np.zeros(len(good), np.int64)
        else:
            text = batch.columns[columns.arrival]
            stamps = (
                datetime_column_ns(text, columns.arrival)
                if columns.unit == "datetime"
                else number_column_ns(text, columns.arrival, columns.unit)
            )
            good = usable(batch, stamps, given, made)
            time = stamps.values
        chunk = chunk_of(batch, good, time, given, made)
        if columns.kind is not None:
            chunk.kind = kinds.of_rows(batch.columns[columns.kind], good)
        if columns.session is not None:
            names = np.asarray(batch.columns[columns.session].to_numpy(zero_copy_only=False))[good]
            _link(book, names.tolist(), chunk)
        book.num_rows += len(chunk)
        yield chunk


def _link(book: SessionBook, names: list[str], chunk: Chunk) -> None:
    """Number the sessions; turns follow each other, but share no prefix: a plain file does not say so."""
    n = len(chunk)
    chunk.session, chunk.turn = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    chunk.parent = np.full(n, -1, np.int64)
    for row, name in enumerate(names):
        if name:
            session, turn, parent = _next_turn(book, name, int(chunk.time_ns[row]) / 1e9, book.num_rows + row)
            chunk.session[row], chunk.turn[row], chunk.parent[row] = session, turn, parent


def _next_turn(book: SessionBook, name: str, time_s: float, row: int) -> tuple[int, int, int]:
    """(session, turn, parent) of a row, remembered as its session's latest."""
    before = book.last.get(name)
    session = book.new_session() if before is None else before.session
    turn = 0 if before is None else before.turn + 1
    parent = before.row if before is not None and time_s >= before.time_s else -1
    book.last[name] = LastTurn(session, row, turn, time_s, float("nan"), 0)
    return session, turn, parent


def read_lines(path: Path, options: Options) -> Iterator[Chunk]:
    columns = ColumnMap.of(options.columns)
    builder = Builder(sessions=columns.session is not None, kinds=columns.kind is not None)
    book = SessionBook()
    stamp: Callable[[Row], int]
    if columns.arrival is None:
        stamp = _at_zero
    elif columns.unit == "datetime":
        stamp = _DateOf(columns.arrival)
    else:
        name = columns.arrival

        def stamp(obj: Row) -> int:
            return stamp_ns(obj, name, columns.unit)

    def row(line: int, obj: Row) -> None:
        values = stamp(obj), tokens(obj, columns.input_tokens), tokens(obj, columns.output_tokens)
        session = None if columns.session is None else obj.get(columns.session)
        kind = None if columns.kind is None else obj.get(columns.kind)
        if session in (None, ""):
            builder.add(line, *values, kind=kind)
        else:
            number, turn, parent = _next_turn(book, str(session), values[0] / 1e9, builder.num_rows)
            builder.add(line, *values, session=number, turn=turn, parent=parent, kind=kind)

    return read_jsonl(path, builder, row)


def _at_zero(obj: Row) -> int:
    return 0


class _DateOf:
    """The stamp of a row's wall-clock column."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, obj: Row) -> int:
        import pyarrow as pa

        from ..builder import BadRow

        parsed = datetime_column_ns(pa.array([str(obj.get(self.name) or "")]), self.name)
        if not parsed.good[0]:
            raise BadRow(*parsed.reason[0])
        return int(parsed.values[0])


def _never(head: Head) -> bool:
    return False


def _named(head: Head) -> bool:
    return head.kind == "csv" and set(DEFAULT_MAP.values()) <= set(head.header)


def _named_lines(head: Head) -> bool:
    return head.kind == "json" and set(DEFAULT_MAP.values()) <= head.keys


_TAKES = frozenset({"columns"})
CSV = Format("csv", "plain CSV with a map", read_csv, _named, takes=_TAKES)
JSONL = Format("jsonl", "plain JSON lines with a map", read_lines, _named_lines, takes=_TAKES)
PARQUET = Format("parquet", "plain Parquet with a map", read_parquet, _never, takes=_TAKES)
