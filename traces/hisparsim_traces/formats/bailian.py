"""Qwen-Bailian JSONL: stamps in seconds, one prefix hash for each 16 tokens, partial last included.

`input_length` is the whole prompt (history included). `parent_chat_id` is the turn before, -1 for none; a
parent outside the file (a slice) leaves its turn an arrival of its own. No service times, so think times
are unknown. `type` (text, search, image, ...) is the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..builder import BadRow, Builder
from ..jsonl import Row, id_list, read_jsonl, stamp_ns, tokens
from ..rows import Chunk, Format, Head, Options

BLOCK_TOKENS = 16
_NEEDED = {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"}


def read(path: Path, options: Options) -> Iterator[Chunk]:
    builder = Builder(blocks=True, sessions=True, kinds=True)
    known: dict[object, tuple[int, int, int]] = {}  # chat_id -> (session, turn, row)
    num_sessions = 0
    missing_parents = 0

    def row(line: int, obj: Row) -> None:
        nonlocal num_sessions, missing_parents
        chat, parent_chat = obj.get("chat_id"), obj.get("parent_chat_id")
        if not isinstance(chat, (int, str)):
            raise BadRow("no chat_id")
        if chat in known:
            raise BadRow("repeated chat_id", str(chat)[:40])
        values = (
            stamp_ns(obj, "timestamp", "s"),
            tokens(obj, "input_length"),
            tokens(obj, "output_length"),
            id_list(obj) if "hash_ids" in obj else [],
        )
        before = known.get(parent_chat) if isinstance(parent_chat, (int, str)) else None
        if before is None:
            missing_parents += parent_chat not in (-1, None, "-1", "")
            session, turn, parent = num_sessions, 0, -1
        else:
            session, turn, parent = before[0], before[1] + 1, before[2]
        at = builder.add(line, *values, session=session, turn=turn, parent=parent, kind=obj.get("type"))
        num_sessions += before is None
        known[chat] = (session, turn, at)

    def take() -> Chunk:
        notes = ("turns whose parent is not in the file arrive on their own",) if missing_parents else ()
        return builder.take(block_tokens=options.block_tokens or BLOCK_TOKENS, notes=notes)

    return read_jsonl(path, builder, row, take)


def recognise(head: Head) -> bool:
    return head.kind == "json" and head.keys >= _NEEDED


FORMAT = Format(
    "bailian", "Qwen-Bailian JSONL", read, recognise, block_rule="ceil", takes=frozenset({"block_tokens"})
)
