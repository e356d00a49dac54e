"""Writing a trace: Mooncake JSONL, which every tool reads, or the project's Parquet, which keeps
everything.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import numpy as np

from .errors import TraceError
from .formats.mooncake import BLOCK_TOKENS
from .formats.own_parquet import write as write_parquet
from .trace import Ints, Trace

__all__ = ["mooncake_blocks", "write_mooncake", "write_parquet"]


def write_mooncake(trace: Trace, path: Path) -> None:
    """Write Mooncake JSONL (gzip where the name ends in .gz): milliseconds, 512-token prefix blocks.

    Turns without a stamp, or with a known think time, become `session_id` and `delay`, which a chain of turns
    can say; a tree of turns (sub-agents) is written with its stamps alone.

    Raises:
        TraceError: turns form a tree and have no stamps, or the block size does not divide 512.
    """
    chain = _chains(trace)
    if chain is None and np.isnan(trace.arrival_s).any():
        raise TraceError(
            f"trace {trace.name!r} has turns that wait for a call in the middle of another's chain, and no "
            "stamps for them; Mooncake rows cannot say that: write Parquet instead (--to parquet)"
        )
    with _writer(path) as out:
        for row, ids in enumerate(mooncake_blocks(trace)):
            line: dict[str, object] = {}
            if not np.isnan(trace.arrival_s[row]):
                line["timestamp"] = round(float(trace.arrival_s[row]) * 1e3)
            line["input_length"] = int(trace.input_tokens[row])
            line["output_length"] = int(trace.output_tokens[row])
            line["hash_ids"] = ids
            if chain is not None and chain[row] >= 0:
                line["session_id"] = str(chain[row])
                if not np.isnan(trace.think_s[row]):
                    line["delay"] = float(trace.think_s[row]) * 1e3
            out.write(json.dumps(line).encode() + b"\n")


def _writer(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(path, "wb", mtime=0))
    return path.open("wb")


def _chains(trace: Trace) -> Ints | None:
    """The chain of each row, -1 where it neither waits nor is waited for; None where turns branch."""
    parent = trace.parent
    waits = parent >= 0
    if len(np.unique(parent[waits])) != int(waits.sum()):
        return None
    chain = np.full(trace.num_requests, -1, np.int64)
    chain[parent[waits]] = parent[waits]
    for row in np.flatnonzero(waits).tolist():
        chain[row] = chain[parent[row]]
    return chain


def mooncake_blocks(trace: Trace) -> Iterator[list[int]]:
    """ceil(input / 512) ids of each request in turn, equal exactly where the trace says that content is.

    From smaller blocks, an id stands for the last of them inside; a last block that they do not reach the
    end of is known to no other request. Without ids, a turn repeats its parent's blocks as far as it shares
    its context.
    """
    if trace.block_tokens is not None:
        if BLOCK_TOKENS % trace.block_tokens:
            raise TraceError(
                f"blocks of {trace.block_tokens} tokens do not fill Mooncake's {BLOCK_TOKENS}: "
                "write Parquet instead (--to parquet)"
            )
        return _coarser(trace)
    return _from_turns(trace)


def _coarser(trace: Trace) -> Iterator[list[int]]:
    size = trace.block_tokens
    assert size is not None
    if size == BLOCK_TOKENS:
        yield from (trace.blocks(row).tolist() for row in range(trace.num_requests))
        return
    each = BLOCK_TOKENS // size
    numbers: dict[tuple[int, bool], int] = {}
    fresh = 0
    for row in range(trace.num_requests):
        ids = trace.blocks(row)
        length = int(trace.input_tokens[row])
        out: list[int] = []
        for block in range(-(-length // BLOCK_TOKENS)):
            full = (block + 1) * BLOCK_TOKENS <= length
            last = (block + 1) * each - 1 if full else -(-length // size) - 1
            key = (int(ids[last]), full) if last < len(ids) else (-1 - fresh, full)
            if key not in numbers:
                numbers[key] = fresh
                fresh += 1
            out.append(numbers[key])
        yield out


def _from_turns(trace: Trace) -> Iterator[list[int]]:
    fresh = 0
    parents = set(trace.parent[trace.parent >= 0].tolist())
    contexts: dict[int, list[int]] = {}  # ids of the whole blocks of a prompt and its output
    children = np.bincount(trace.parent[trace.parent >= 0], minlength=trace.num_requests)
    for row in range(trace.num_requests):
        length, parent = int(trace.input_tokens[row]), int(trace.parent[row])
        ids: list[int] = []
        if parent >= 0:
            ids = contexts[parent][: int(trace.shared_prefix_tokens[row]) // BLOCK_TOKENS]
            children[parent] -= 1
            if not children[parent]:
                del contexts[parent]
        missing = -(-length // BLOCK_TOKENS) - len(ids)
        ids = ids + list(range(fresh, fresh + missing))
        fresh += missing
        if row in parents:
            whole = ids[: length // BLOCK_TOKENS]
            more = (length + int(trace.output_tokens[row])) // BLOCK_TOKENS - len(whole)
            contexts[row] = whole + list(range(fresh, fresh + more))
            fresh += more
        yield ids
