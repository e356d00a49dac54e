"""LLMServingSim JSONL: flat requests, or sessions with `sub_requests` and the tool time after each.

Arrivals are nanoseconds. Where token ids are given (`input_tok_ids`), blocks of 16 of them give prefix
identity, the partial tail left out. Sub-requests wait for the one before and its `tool_duration_ns`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from ..builder import BadRow, Builder
from ..jsonl import Row, read_jsonl, seconds, stamp_ns, tokens
from ..rows import NO_STAMP, Chunk, Format, Head, Options

BLOCK_TOKENS = 16


def read(path: Path, options: Options) -> Iterator[Chunk]:
    builder = Builder(blocks=True, sessions=True)
    sessions = 0
    has_ids = False

    def block_hashes(obj: Row) -> list[int]:
        nonlocal has_ids
        given = obj.get("input_tok_ids") or []
        try:
            ids = array("q", given)
        except (TypeError, OverflowError):
            raise BadRow("unreadable input_tok_ids", "a list of whole numbers is expected") from None
        if ids and len(ids) != tokens(obj, "input_toks"):
            raise BadRow(
                "length of input_tok_ids", f"{len(ids)} ids, input_toks says {obj.get('input_toks')}"
            )
        has_ids = has_ids or bool(ids)
        out: list[int] = []
        digest = b""
        for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
            digest = hashlib.blake2b(digest + ids[end - BLOCK_TOKENS : end].tobytes(), digest_size=8).digest()
            out.append(int.from_bytes(digest, "little"))
        return out

    def row(line: int, obj: Row) -> None:
        nonlocal sessions
        arrival = stamp_ns(obj, "arrival_time_ns", "ns")
        if "sub_requests" not in obj:
            builder.add(
                line, arrival, tokens(obj, "input_toks"), tokens(obj, "output_toks"), block_hashes(obj)
            )
            return
        turns = obj["sub_requests"]
        if type(turns) is not list or not all(type(turn) is dict for turn in turns) or not turns:
            raise BadRow("unreadable sub_requests", "a list of objects is expected")
        parsed = []
        for turn in turns:
            tool_ns = seconds(turn, "tool_duration_ns") or 0.0
            if tool_ns < 0:
                raise BadRow("negative tool_duration_ns", f"{tool_ns:g}")
            parsed.append(
                (tokens(turn, "input_toks"), tokens(turn, "output_toks"), block_hashes(turn), tool_ns / 1e9)
            )
        parent, think_s = -1, float("nan")
        for number, (inputs, outputs, ids, tool_s) in enumerate(parsed):
            parent = builder.add(
                line,
                NO_STAMP if number else arrival,
                inputs,
                outputs,
                ids,
                session=sessions,
                turn=number,
                parent=parent,
                think_s=think_s,
            )
            think_s = tool_s
        sessions += 1

    return read_jsonl(
        path, builder, row, lambda: builder.take(block_tokens=BLOCK_TOKENS if has_ids else None)
    )


def recognise(head: Head) -> bool:
    return (
        head.kind == "json"
        and "arrival_time_ns" in head.keys
        and bool(head.keys & {"sub_requests", "input_toks"})
    )


FORMAT = Format("llmservingsim", "LLMServingSim JSONL", read, recognise, block_rule="floor")
