"""The project's own Parquet: every column of a Trace, nothing lost. Written by `trace convert --to
parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..kinds import KindBook
from ..rows import MAX_TOKENS, NO_STAMP, Chunk, Format, Head, Options
from ..trace import Trace

MAGIC = b"hisparsim_trace"
VERSION = 1
_ROWS_A_GROUP = 65_536


def write(trace: Trace, path: Path) -> None:
    """Write a trace. Arrivals are whole nanoseconds; missing stamps and think times are nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = ~np.isnan(trace.arrival_s)
    time_ns = np.rint(np.where(known, trace.arrival_s, 0.0) * 1e9).astype(np.int64)
    columns: dict[str, Any] = {
        "time_ns": pa.array(time_ns, mask=~known),
        "input_tokens": pa.array(trace.input_tokens),
        "output_tokens": pa.array(trace.output_tokens),
        "session": pa.array(trace.session),
        "turn": pa.array(trace.turn),
        "parent": pa.array(trace.parent),
        "think_s": pa.array(trace.think_s, mask=np.isnan(trace.think_s)),
        "shared_prefix_tokens": pa.array(trace.shared_prefix_tokens),
    }
    if trace.block_tokens is not None:
        columns["block_ids"] = pa.LargeListArray.from_arrays(trace.block_offsets, pa.array(trace.block_ids))
    if trace.kind is not None:
        codes = pa.array(trace.kind.codes, mask=trace.kind.codes < 0)
        columns["kind"] = pa.DictionaryArray.from_arrays(codes, pa.array(trace.kind.names, pa.string()))
    about = {
        "version": VERSION,
        "name": trace.name,
        "source_format": trace.format,
        "source_sha256": trace.sha256,
        "block_tokens": trace.block_tokens,
    }
    table = pa.table(columns).replace_schema_metadata({MAGIC: json.dumps(about).encode()})
    pq.write_table(table, path, compression="zstd", row_group_size=_ROWS_A_GROUP, write_page_checksum=True)


def read(path: Path, options: Options) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        about = json.loads((file.schema_arrow.metadata or {}).get(MAGIC, b"null"))
        if type(about) is not dict or about.get("version") != VERSION:
            raise TraceError(f"is not a hisparsim trace of version {VERSION}: convert it again", path=path)
        block_tokens = about.get("block_tokens")
        line, kinds = 1, KindBook()
        for batch in file.iter_batches(batch_size=_ROWS_A_GROUP):
            yield _chunk(batch, line, block_tokens, kinds)
            line += batch.num_rows
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"is not a readable hisparsim trace ({str(error)[:160]})", path=path) from error


def _chunk(batch: Any, line: int, block_tokens: int | None, kinds: KindBook) -> Chunk:
    import pyarrow as pa
    import pyarrow.compute as pc

    def whole(name: str, null: int | None = None) -> Any:
        column = batch.column(name)
        if null is not None:
            column = pc.fill_null(column, null)
        if column.null_count:
            raise ValueError(f"column {name} has nulls")
        return np.asarray(column, dtype=np.int64)

    think = np.asarray(pc.fill_null(batch.column("think_s"), float("nan")), dtype=np.float64)
    chunk = Chunk(
        line=np.arange(line, line + batch.num_rows),
        time_ns=whole("time_ns", NO_STAMP),
        input_tokens=whole("input_tokens"),
        output_tokens=whole("output_tokens"),
        session=whole("session"),
        turn=whole("turn"),
        parent=whole("parent"),
        think_s=think,
        shared_prefix_tokens=whole("shared_prefix_tokens"),
        block_tokens=block_tokens,
    )
    rows = np.arange(line - 1, line - 1 + batch.num_rows)
    assert chunk.parent is not None and chunk.turn is not None and chunk.session is not None
    for name, wrong in (
        ("input_tokens", (chunk.input_tokens < 0) | (chunk.input_tokens > MAX_TOKENS)),
        ("output_tokens", (chunk.output_tokens < 0) | (chunk.output_tokens > MAX_TOKENS)),
        ("parent", (chunk.parent < -1) | (chunk.parent >= rows)),
        ("think_s", think < 0),
        ("turn", (chunk.turn < 0) | (chunk.session < -1)),
        ("time_ns", (chunk.time_ns == NO_STAMP) & (chunk.parent < 0)),
    ):
        if wrong.any():
            raise ValueError(f"row {line + int(np.flatnonzero(wrong)[0])} breaks the rule of {name}")
    if "kind" in batch.schema.names:
        names = pc.cast(batch.column("kind"), pa.string())
        chunk.kind = kinds.of_rows(names, np.ones(batch.num_rows, bool))
    if block_tokens is not None:
        lists = batch.column("block_ids")
        chunk.block_counts = np.asarray(pc.list_value_length(lists), dtype=np.int64)
        ids = np.asarray(lists.flatten(), dtype=np.int64)
        if (ids < 0).any():
            raise ValueError("a block id is negative")
        chunk.block_ids = ids.astype(np.uint64)
    return chunk


def recognise(head: Head) -> bool:
    if head.kind != "parquet":
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return MAGIC in (pq.read_schema(head.path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


FORMAT = Format("hisparsim", "the project's Parquet", read, recognise, block_rule="given")
