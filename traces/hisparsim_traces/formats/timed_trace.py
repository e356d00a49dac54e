"""vLLM `timed_trace`: the keys of Mooncake with the unit and the block size left to the reader (seconds,
16).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..builder import Builder
from ..errors import TraceError
from ..jsonl import NS_PER, Row, id_list, read_jsonl, stamp_ns, tokens
from ..rows import Chunk, Format, Head, Options
from .mooncake import KEYS, is_plainly_mooncake

BLOCK_TOKENS = 16


def read(path: Path, options: Options) -> Iterator[Chunk]:
    unit = options.time_unit or "s"
    if unit not in NS_PER:
        raise TraceError(f"time unit {unit!r}: one of {', '.join(NS_PER)}", path=path)
    builder = Builder(blocks=True)

    def row(line: int, obj: Row) -> None:
        builder.add(
            line,
            stamp_ns(obj, "timestamp", unit),
            tokens(obj, "input_length"),
            tokens(obj, "output_length"),
            id_list(obj) if "hash_ids" in obj else [],
        )

    return read_jsonl(
        path, builder, row, lambda: builder.take(block_tokens=options.block_tokens or BLOCK_TOKENS)
    )


def recognise(head: Head) -> bool:
    """Only a candidate beside Mooncake, where the rows do not settle which of the two it is."""
    return (
        head.kind == "json"
        and head.keys >= KEYS
        and head.keys <= KEYS | {"hash_ids"}
        and not is_plainly_mooncake(head)
    )


FORMAT = Format(
    "timed_trace",
    "vLLM timed_trace JSONL",
    read,
    recognise,
    block_rule="ceil",
    takes=frozenset({"block_tokens", "time_unit"}),
)
