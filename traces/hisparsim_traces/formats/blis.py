"""BLIS traceV2 CSV (its data file): arrivals in microseconds, sessions by round.

`arrival_time_us` counts from the run's start; `send_time_us` may be epoch time and is not used. Rows whose
status is not ok failed and are dropped by name. Later rounds of a session wait for the round before; think
times are not recorded on the arrivals' clock and unknown. `slo_class` is the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..csvbatches import csv_batches
from ..csvcolumns import chunk_of, number_column_ns, token_column, usable
from ..kinds import KindBook
from ..rows import Chunk, Format, Head, Options, Rejected
from .sessions import LastTurn, SessionBook

_COLUMNS = ("arrival_time_us", "input_tokens", "output_tokens")


def read(path: Path, options: Options) -> Iterator[Chunk]:
    book, kinds = SessionBook(), KindBook()
    for batch in csv_batches(path):
        batch.require(_COLUMNS, path)
        time = number_column_ns(batch.columns["arrival_time_us"], "arrival_time_us", "us")
        given = token_column(batch.columns["input_tokens"], "input_tokens")
        made = token_column(batch.columns["output_tokens"], "output_tokens")
        good = usable(batch, time, given, made)
        if "status" in batch.columns:
            status = np.asarray(batch.columns["status"].to_numpy(zero_copy_only=False))
            for row in np.flatnonzero(good & (status != "ok") & (status != "")):
                batch.rejected.append(Rejected(int(batch.line[row]), f"status {str(status[row])[:40]}", ""))
                good[row] = False
        n = int(good.sum())
        chunk = chunk_of(batch, good, time.values, given, made)
        chunk.session, chunk.turn = np.full(n, -1, np.int64), np.zeros(n, np.int64)
        chunk.parent = np.full(n, -1, np.int64)
        chunk.kind = kinds.of_rows(batch.columns.get("slo_class"), good)
        if "session_id" in batch.columns:
            names = np.asarray(batch.columns["session_id"].to_numpy(zero_copy_only=False))[good]
            _link(book, names.tolist(), chunk)
        book.num_rows += n
        yield chunk


def _link(book: SessionBook, names: list[str], chunk: Chunk) -> None:
    assert chunk.session is not None and chunk.turn is not None and chunk.parent is not None
    for row, name in enumerate(names):
        if not name:
            continue
        time_s, before = int(chunk.time_ns[row]) / 1e9, book.last.get(name)
        chunk.session[row] = book.new_session() if before is None else before.session
        if before is not None:
            chunk.turn[row] = before.turn + 1
            chunk.parent[row] = before.row if time_s >= before.time_s else -1
        book.last[name] = LastTurn(
            int(chunk.session[row]), book.num_rows + row, int(chunk.turn[row]), time_s, float("nan"), 0
        )


def recognise(head: Head) -> bool:
    return head.kind == "csv" and set(_COLUMNS) <= set(head.header)


FORMAT = Format("blis", "BLIS traceV2 CSV", read, recognise)
