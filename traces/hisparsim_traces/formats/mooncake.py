"""Mooncake JSONL (FAST'25 traces): stamps in milliseconds, one prefix hash for each 512 tokens, partial
last included.

Some tools add `session_id` and `delay` (ms after the previous turn's end); lengths stay whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..builder import BadRow, Builder
from ..jsonl import Row, id_list, read_jsonl, seconds, stamp_ns, tokens
from ..rows import NO_STAMP, Chunk, Format, Head, Options

BLOCK_TOKENS = 512
KEYS = {"timestamp", "input_length", "output_length"}
_MORE = {"hash_ids", "session_id", "delay", "priority", "strict_priority", "policy_class"}


def read(path: Path, options: Options) -> Iterator[Chunk]:
    builder = Builder(blocks=True, sessions=True)
    last_turn: dict[str, tuple[int, int, int]] = {}  # session_id -> (session, row, turn)

    def row(line: int, obj: Row) -> None:
        input_tokens, output_tokens = tokens(obj, "input_length"), tokens(obj, "output_length")
        ids = id_list(obj) if "hash_ids" in obj else []
        key = obj.get("session_id")
        if key is None:
            builder.add(line, stamp_ns(obj, "timestamp", "ms"), input_tokens, output_tokens, ids)
            return
        known = last_turn.get(str(key))
        if known is None:
            session, turn = len(last_turn), 0
            at = builder.add(
                line, stamp_ns(obj, "timestamp", "ms"), input_tokens, output_tokens, ids, session=session
            )
        else:
            session, parent, turn = known[0], known[1], known[2] + 1
            stamp = stamp_ns(obj, "timestamp", "ms") if obj.get("timestamp") is not None else NO_STAMP
            delay_ms = seconds(obj, "delay")
            if delay_ms is not None and delay_ms < 0:
                raise BadRow("negative delay", f"{delay_ms} ms")
            at = builder.add(
                line,
                stamp,
                input_tokens,
                output_tokens,
                ids,
                session=session,
                turn=turn,
                parent=parent,
                think_s=float("nan") if delay_ms is None else delay_ms / 1e3,
            )
        last_turn[str(key)] = (session, at, turn)

    block_tokens = options.block_tokens or BLOCK_TOKENS
    return read_jsonl(path, builder, row, lambda: builder.take(block_tokens=block_tokens))


def is_plainly_mooncake(head: Head) -> bool:
    """Whole-number stamps and ceil(input / 512) ids on every sampled row."""
    for row in head.rows:
        ids, length = row.get("hash_ids"), row.get("input_length")
        if type(row.get("timestamp", 0)) is not int or type(length) is not int or type(ids) is not list:
            return False
        if length and len(ids) != -(-length // BLOCK_TOKENS):
            return False
    return bool(head.rows)


def recognise(head: Head) -> bool:
    if head.kind != "json" or not head.keys >= KEYS or not head.keys <= KEYS | _MORE:
        return False
    return not isinstance(head.first.get("hash_ids"), dict)


FORMAT = Format(
    "mooncake", "Mooncake JSONL", read, recognise, block_rule="ceil", takes=frozenset({"block_tokens"})
)
