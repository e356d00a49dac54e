"""BurstGPT CSV: six columns (parts 1 and 2) or eight (part 3, which inserts Session ID and Elapsed time).

Stamps are seconds; part 3 writes them as whole floats from an origin 225 days earlier. Rows with 0/0 tokens
are failed requests. A blank session is none. Follow-ups shorter than their history had it cut, so they
share nothing. `Log Type` (conversation or API) is the kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..csvbatches import Batch, csv_batches
from ..csvcolumns import Bools, chunk_of, number_column_ns, token_column, usable
from ..kinds import KindBook
from ..rows import Chunk, Format, Head, Options, Rejected
from ..trace import Floats, Ints
from .sessions import LastTurn, SessionBook

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_SESSION, _ELAPSED, _KIND = "Session ID", "Elapsed time", "Log Type"
_CUT = "follow-ups shorter than their history are taken to share none of it"


def read(path: Path, options: Options) -> Iterator[Chunk]:
    book, kinds = SessionBook(), KindBook()
    for batch in csv_batches(path):
        batch.require(_COLUMNS, path)
        time = number_column_ns(batch.columns["Timestamp"], "Timestamp", "s")
        given = token_column(batch.columns["Request tokens"], "Request tokens")
        made = token_column(batch.columns["Response tokens"], "Response tokens")
        good = usable(batch, time, given, made)
        chunk = chunk_of(batch, good, time.values, given, made)
        chunk.kind = kinds.of_rows(batch.columns.get(_KIND), good)
        if _SESSION in batch.columns:
            _link(book, batch, good, chunk)
        else:
            book.num_rows += len(chunk)
        yield chunk


def _link(book: SessionBook, batch: Batch, good: Bools, chunk: Chunk) -> None:
    n = len(chunk)
    names = np.asarray(batch.columns[_SESSION].to_numpy(zero_copy_only=False))[good]
    elapsed = _seconds(batch, good)
    session, turn, parent = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.full(n, -1, np.int64)
    think, shared = np.full(n, np.nan), np.zeros(n, np.int64)
    for row in np.flatnonzero(names != "").tolist():
        before = book.last.get(names[row])
        time_s = int(chunk.time_ns[row]) / 1e9
        inputs, outputs = int(chunk.input_tokens[row]), int(chunk.output_tokens[row])
        if before is None:
            session[row] = book.new_session()
        else:
            session[row], turn[row] = before.session, before.turn + 1
            if time_s >= before.time_s:
                parent[row] = before.row
                pause = time_s - before.time_s - before.service_s
                if pause < 0:
                    chunk.changed.append(
                        Rejected(
                            int(chunk.line[row]), "arrived before the turn before it ended", f"{-pause:.0f} s"
                        )
                    )
                think[row] = max(pause, 0.0) if not math.isnan(pause) else pause
                if inputs >= before.context_tokens:
                    shared[row] = before.context_tokens
                elif _CUT not in chunk.notes:
                    chunk.notes = (*chunk.notes, _CUT)
        book.last[names[row]] = LastTurn(
            int(session[row]),
            book.num_rows + row,
            int(turn[row]),
            time_s,
            float(elapsed[row]),
            inputs + outputs,
        )
    book.num_rows += n
    chunk.session, chunk.turn, chunk.parent = session, turn, parent
    chunk.think_s, chunk.shared_prefix_tokens = think, shared


def _seconds(batch: Batch, good: Bools) -> Floats:
    """Elapsed seconds of each row, NaN where blank or unreadable. [n]"""
    if _ELAPSED not in batch.columns:
        return np.full(int(good.sum()), np.nan)
    column: Ints = np.flatnonzero(good)
    parsed = number_column_ns(batch.columns[_ELAPSED], _ELAPSED, "s")
    return np.where(parsed.good[column], parsed.values[column] / 1e9, np.nan)


def recognise(head: Head) -> bool:
    return head.kind == "csv" and set(_COLUMNS) <= set(head.header)


FORMAT = Format("burstgpt", "BurstGPT CSV", read, recognise)
