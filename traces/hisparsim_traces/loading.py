"""From a file to a Trace: policies applied, every row accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from .collecting import PER_FILE, Collected, Wraps
from .detecting import candidates, detect, read_head
from .errors import TraceError
from .files import exists, open_raw
from .formats import FORMATS
from .policies import OverLong, ZeroTokens, apply_over_long, is_zero, zero_rows
from .rows import Chunk, Format, Options
from .selecting import select_rows
from .trace import LoadReport, Trace


def load(
    source: str | Path,
    *,
    format: str | None = None,
    max_context_tokens: int | None = None,
    over_long: OverLong = "reject",
    zero_tokens: ZeroTokens = "drop",
    wraps: Wraps = "sort",
    strict: bool = False,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    block_tokens: int | None = None,
    seed: int | None = None,
    duration_s: float | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
) -> Trace:
    """Read a trace file, or a bundled trace by name.

    Args:
        source: a path (plain, gzip or zstd), a directory of files of one session format, or a bundled name.
        format: a name of `FORMATS`; None detects it from the content.
        max_context_tokens: the longest prompt plus output that may be kept; None = no limit.
        over_long: what happens to a longer row: "reject" raises and names the smallest window that admits
            anything; "skip" drops the row; "truncate" shortens its prompt (output stays); "skip-session"
            drops its whole session.
        zero_tokens: rows without prompt or without output: "drop" (counted), "error", or "keep" (for
            statistics; such a trace cannot be replayed).
        wraps: where stamps jump back by more than a minute: "sort" by stamp; "continue" the time from the
            jump on, for recordings put one after the other; "error".
        strict: a dropped or changed row is an error with its line.
        limit: stop after this many kept requests, without parsing the rest.
        columns: column names and units for the plain formats, such as {"arrival": "ts:ms"}.
        block_tokens: tokens a block id covers, where the format leaves it open.
        seed, duration_s: for client models that are drawn into requests (ServeGen).
        time_unit: for the format that leaves its unit open (timed_trace).

    Raises:
        TraceError: the file cannot be read, fits no format or several, or breaks a rule that was asked for.
    """
    from .bundled import BUNDLED, load_bundled

    if wraps not in ("sort", "continue", "error"):
        raise TraceError(f"wraps {wraps!r}: one of sort, continue, error")
    options = Options(columns, block_tokens, seed, duration_s, time_unit)
    name = str(source)
    path = Path(source)
    found = exists(path)
    if name in BUNDLED and not found:
        if format is not None or options.given():
            raise TraceError(f"bundled trace {name!r} takes neither a format nor reading options")
        trace = load_bundled(name)
        if limit is not None:
            trace = trace.head(_at_least_one(limit))
        return apply_over_long(trace, max_context_tokens, over_long, strict)
    if not found:
        raise TraceError(f"no such file, and no bundled trace of that name ({', '.join(BUNDLED)})", path=path)

    chosen = choose_format(path, format, columns)
    files = files_of(path, chosen)
    unknown = options.given() - chosen.takes
    if unknown:
        raise TraceError(f"format {chosen.name} does not take {', '.join(sorted(unknown))}", path=path)
    collected = Collected(path, strict, wraps)
    for chunk in _limited(
        read_chunks(files, chosen, options), limit, max_context_tokens, over_long, zero_tokens
    ):
        collected.take(chunk)
    trace = collected.trace(files, chosen)
    if chosen.block_rule == "given":  # nothing else has looked at how its columns fit together
        _check_columns(trace, path)
    trace = apply_zero_tokens(trace, zero_tokens, strict, path)
    trace = apply_over_long(trace, max_context_tokens, over_long, strict, path)
    if limit is not None and over_long == "skip-session":
        trace = trace.head(limit)
    if not trace.num_requests:
        dropped = ", ".join(f"{count} {reason}" for reason, count in trace.loading.rows_dropped.items())
        raise TraceError(f"holds no usable request (dropped: {dropped or 'nothing was there'})", path=path)
    return trace


def _check_columns(trace: Trace, path: Path) -> None:
    try:
        trace.check(allow_zero_tokens=True)
    except TraceError as error:
        raise TraceError(f"is damaged ({error})", path=path) from error


def _at_least_one(limit: int) -> int:
    if limit < 1:
        raise TraceError(f"limit {limit}: must be at least 1 request")
    return limit


def choose_format(path: Path, name: str | None, columns: Mapping[str, str] | None) -> Format:
    """The named format, or the detected one; a map alone means the plain format of the file's kind."""
    if name is None and path.is_dir():
        for file in sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")):
            try:
                found = [FORMATS[known] for known in candidates(file) if FORMATS[known].sessions_whole]
            except TraceError:  # a note or a damaged file beside the traces; reading will not pass over one
                continue
            if len(found) == 1 and file.match(found[0].pattern):
                return found[0]
        raise TraceError(
            "is a folder without files of a format that is read by the folder: name one", path=path
        )
    if not path.is_dir():
        open_raw(path).close()
    if name is None and columns is not None:
        name = {"csv": "csv", "json": "jsonl", "parquet": "parquet"}[read_head(path).kind]
    name = detect(path) if name is None else name
    if name not in FORMATS:
        raise TraceError(f"unknown format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]


def files_of(path: Path, chosen: Format) -> list[Path]:
    """The file itself, or a folder's files of the format, by name."""
    if not path.is_dir():
        return [path]
    if not chosen.sessions_whole:
        raise TraceError(f"is a folder; {chosen.name} is read one file at a time", path=path)
    files = sorted(p for p in path.glob(chosen.pattern) if p.is_file() and not p.name.startswith("."))
    if not files:
        raise TraceError(f"holds no file {chosen.pattern}", path=path)
    return files


def read_chunks(files: list[Path], chosen: Format, options: Options) -> Iterator[Chunk]:
    """The chunks of a file, or of a folder's files in turn, their sessions and ids kept apart."""
    rows = sessions = ids = 0
    for number, path in enumerate(files):
        rows_before, sessions_before, ids_before = rows, sessions, ids
        for chunk in chosen.read(path, options):
            rows += len(chunk)
            if number:
                chunk.line = chunk.line + number * PER_FILE
                if chunk.parent is not None:
                    chunk.parent = np.where(chunk.parent >= 0, chunk.parent + rows_before, -1)
                if chunk.session is not None:
                    chunk.session = np.where(chunk.session >= 0, chunk.session + sessions_before, -1)
                if chunk.block_ids is not None:
                    chunk.block_ids = chunk.block_ids + np.uint64(ids_before)
            if chunk.session is not None and len(chunk):
                sessions = max(sessions, int(chunk.session.max()) + 1)
            if len(files) > 1 and chunk.block_ids is not None and len(chunk.block_ids):
                ids = max(ids, int(chunk.block_ids.max()) + 1)
            yield chunk


def _limited(
    chunks: Iterable[Chunk], limit: int | None, max_context: int | None, over_long: OverLong, zero: ZeroTokens
) -> Iterator[Chunk]:
    """The chunks up to the `limit`-th row that will be kept."""
    if limit is None or over_long == "skip-session":
        yield from chunks
        return
    left = _at_least_one(limit)
    for chunk in chunks:
        kept = np.ones(len(chunk), bool)
        if zero == "drop":
            kept &= ~is_zero(chunk.input_tokens, chunk.output_tokens)
        if max_context is not None and over_long == "skip":
            kept &= chunk.input_tokens + chunk.output_tokens <= max_context
        elif max_context is not None and over_long == "truncate":
            kept &= chunk.output_tokens < max_context
        places = np.flatnonzero(kept)
        if len(places) >= left:
            yield chunk.first(int(places[left - 1]) + 1)
            return
        left -= len(places)
        yield chunk


def apply_zero_tokens(trace: Trace, policy: ZeroTokens, strict: bool, path: Path) -> Trace:
    """The trace without rows that lack a prompt or an output, each counted by its reason."""
    if policy not in ("drop", "error", "keep"):
        raise TraceError(f"zero_tokens {policy!r}: one of drop, error, keep")
    zero = is_zero(trace.input_tokens, trace.output_tokens)
    if policy == "keep" or not zero.any():
        return trace
    reasons = zero_rows(trace.input_tokens, trace.output_tokens)
    if policy == "error" or strict:
        row = int(np.flatnonzero(zero)[0])
        reason = next(reason for reason, rows in reasons.items() if row in rows)
        raise TraceError(
            f"{reason}: {int(zero.sum())} rows lack tokens; load with zero_tokens='drop', not strict, to "
            "leave them out, counted",
            path=path,
            line=int(trace.source_line[row]),
        )
    kept = select_rows(trace, ~zero)
    return _with_dropped(kept, trace.loading, {reason: len(rows) for reason, rows in reasons.items()})


def _with_dropped(trace: Trace, before: LoadReport, reasons: Mapping[str, int]) -> Trace:
    """The trace with its left-out rows accounted to reasons."""
    dropped = Counter(before.rows_dropped)
    dropped.update(reasons)
    report = replace(before, rows_kept=trace.num_requests, rows_dropped=dict(dropped))
    return replace(trace, loading=report)
