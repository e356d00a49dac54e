"""RAGPulse JSONL: stamps are strings of seconds, and wrap where two collections were joined.

`hash_ids` is an object of five lists of segments of variable length (told only by side files), so they are no
prefix blocks and are left out. Turns of a session follow each other; over the wrap the chain starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..builder import Builder
from ..jsonl import Row, read_jsonl, stamp_ns, tokens
from ..rows import Chunk, Format, Head, Options
from .sessions import LastTurn, SessionBook

_NOTE = "segment ids have variable lengths and are not used as prefix blocks"


def read(path: Path, options: Options) -> Iterator[Chunk]:
    builder = Builder(sessions=True)
    book = SessionBook()

    def row(line: int, obj: Row) -> None:
        ns = stamp_ns(obj, "timestamp", "s")
        inputs, outputs = tokens(obj, "input_length"), tokens(obj, "output_length")
        name = obj.get("session_id")
        if name in (None, ""):
            builder.add(line, ns, inputs, outputs)
            return
        before = book.last.get(str(name))
        session = book.new_session() if before is None else before.session
        turn = 0 if before is None else before.turn + 1
        parent = before.row if before is not None and ns / 1e9 >= before.time_s else -1
        at = builder.add(line, ns, inputs, outputs, session=session, turn=turn, parent=parent)
        book.last[str(name)] = LastTurn(session, at, turn, ns / 1e9, float("nan"), inputs + outputs)

    return read_jsonl(path, builder, row, lambda: builder.take(notes=(_NOTE,)))


def recognise(head: Head) -> bool:
    if head.kind != "json" or not head.keys >= {"timestamp", "input_length", "output_length", "session_id"}:
        return False
    ids = head.first.get("hash_ids")
    return isinstance(ids, dict) if head.first else "passages_ids" in head.keys


FORMAT = Format("ragpulse", "RAGPulse JSONL", read, recognise)
