"""Dynamo request trace (`dynamo.request.trace.v1`) JSONL: one `request_end` record a request.

Stamps are epoch milliseconds (`request_received_ms`); the block size stands in each record, ids are 64-bit
and cover the partial last block. With `agent_context` on the rows, turns of a session wait for the turn
before; a record's end is `event_time_unix_ms` or its start plus `total_time_ms`. Other events (tools) are
not requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..builder import BadRow, Builder
from ..jsonl import Row, id_list, read_jsonl, seconds, stamp_ns, tokens
from ..rows import Chunk, Format, Head, Options
from .sessions import LastTurn, SessionBook

SCHEMA = "dynamo.request.trace.v1"
_OTHER_EVENTS = "events that are no requests (tools) are passed over"


def read(path: Path, options: Options) -> Iterator[Chunk]:
    builder = Builder(blocks=True, sessions=True)
    book = SessionBook()
    size: int | None = None
    notes: tuple[str, ...] = ()

    def row(line: int, obj: Row) -> None:
        nonlocal size, notes
        record = next((obj[key] for key in ("event", "record") if type(obj.get(key)) is dict), obj)
        if record.get("schema") != SCHEMA:
            raise BadRow("not a " + SCHEMA + " record", repr(record.get("schema"))[:60])
        if record.get("event_type") != "request_end":
            notes = (_OTHER_EVENTS,)
            return
        request = _object(record, "request")
        replay = _object(request, "replay")
        block = tokens(replay, "trace_block_size")
        if block < 1 or (size is not None and block != size):
            raise BadRow("other trace_block_size", f"{block}, the file's is {size}")
        start_ns = stamp_ns(request, "request_received_ms", "ms")
        values = (start_ns, tokens(replay, "input_length"), tokens(request, "output_tokens"))
        ids = id_list(replay, "input_sequence_hashes")
        context = record.get("agent_context")
        name = context.get("session_id") if type(context) is dict else None
        size = block
        if name in (None, ""):
            builder.add(line, *values, ids)
            return
        start_s, before = start_ns / 1e9, book.last.get(str(name))
        session = book.new_session() if before is None else before.session
        turn = 0 if before is None else before.turn + 1
        think_s = float("nan")
        if before is not None:
            think_s = start_s - before.time_s - before.service_s
            if think_s < 0:
                builder.change(line, "arrived before the turn before it ended", f"{-think_s:.3f} s")
                think_s = 0.0
        at = builder.add(
            line,
            *values,
            ids,
            session=session,
            turn=turn,
            parent=-1 if before is None else before.row,
            think_s=think_s,
        )
        book.last[str(name)] = LastTurn(session, at, turn, start_s, _service_s(record, request, start_s), 0)

    return read_jsonl(path, builder, row, lambda: builder.take(block_tokens=size, notes=notes))


def _object(row: Row, key: str) -> Row:
    value = row.get(key)
    if type(value) is not dict:
        raise BadRow(f"no {key}", "an object is expected")
    return value


def _service_s(record: Row, request: Row, start_s: float) -> float:
    total_ms = seconds(request, "total_time_ms")
    if total_ms is not None:
        return total_ms / 1e3
    end_ms = seconds(record, "event_time_unix_ms")
    return float("nan") if end_ms is None else max(end_ms / 1e3 - start_s, 0.0)


def recognise(head: Head) -> bool:
    return (
        head.kind == "json" and SCHEMA.encode() in head.raw and not head.keys >= {"input_length", "hash_ids"}
    )


FORMAT = Format("dynamo", "Dynamo request trace JSONL", read, recognise, block_rule="ceil")
