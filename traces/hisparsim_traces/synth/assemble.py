"""A synthetic Trace from its columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..selecting import renumber
from ..trace import Floats, Ints, LoadReport, Trace, columns_sha256, no_blocks, offered

US_PER_S = 1e6


def whole_us(seconds: Floats) -> Floats:
    """Seconds rounded to whole microseconds, NaN kept, so that stored and drawn columns are the same. [n]"""
    return np.asarray(np.rint(seconds * US_PER_S) / US_PER_S)


def synthetic_trace(
    name: str,
    arrival_s: Floats,
    input_tokens: Ints,
    output_tokens: Ints,
    *,
    session: Ints | None = None,
    turn: Ints | None = None,
    parent: Ints | None = None,
    think_s: Floats | None = None,
    shared_prefix_tokens: Ints | None = None,
    blocks: tuple[int | None, Ints, Ints] | None = None,
    notes: tuple[str, ...] = (),
) -> Trace:
    """A checked Trace of format "synthetic"; its sha256 is that of its columns."""
    n = len(input_tokens)
    block_tokens, offsets, ids = blocks or no_blocks(n)
    arrival = whole_us(arrival_s)
    trace = Trace(
        name=name,
        format="synthetic",
        sha256="",
        arrival_s=arrival - np.nanmin(arrival) if n else arrival,
        input_tokens=np.asarray(input_tokens, np.int64),
        output_tokens=np.asarray(output_tokens, np.int64),
        session=np.full(n, -1, np.int64) if session is None else renumber(session),
        turn=np.zeros(n, np.int64) if turn is None else turn,
        parent=np.full(n, -1, np.int64) if parent is None else parent,
        think_s=np.full(n, np.nan) if think_s is None else whole_us(think_s),
        shared_prefix_tokens=np.zeros(n, np.int64) if shared_prefix_tokens is None else shared_prefix_tokens,
        block_tokens=block_tokens,
        block_offsets=offsets,
        block_ids=renumber(ids),
        source_line=np.arange(1, n + 1),
        loading=LoadReport(rows_read=n, rows_kept=n, notes=notes, offered=offered(arrival)),
    )
    trace.check()
    return replace(trace, sha256=columns_sha256(trace))
