"""From a file to a Trace: policies applied, every row accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from .blocks import BlockColumns, fit_block_counts, intern_blocks
from .detecting import candidates, detect, read_head
from .errors import TraceError
from .files import sha256_of
from .formats import FORMATS
from .policies import OverLong, ZeroTokens, apply_over_long, is_zero, zero_rows
from .rows import NO_STAMP, Chunk, Format, Options, Rejected
from .selecting import renumber, select_rows
from .trace import Floats, Ints, LoadReport, Trace, no_blocks, offered

_PER_FILE = 1 << 40  # lines of the k-th file of a directory are numbered from k * 2^40 while reading


def load(
    source: str | Path,
    *,
    format: str | None = None,
    max_context_tokens: int | None = None,
    over_long: OverLong = "reject",
    zero_tokens: ZeroTokens = "drop",
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

    options = Options(columns, block_tokens, seed, duration_s, time_unit)
    name = str(source)
    path = Path(source)
    if name in BUNDLED and not path.exists():
        if format is not None or options.given():
            raise TraceError(f"bundled trace {name!r} takes neither a format nor reading options")
        trace = load_bundled(name)
        if limit is not None:
            trace = trace.head(_at_least_one(limit))
        return apply_over_long(trace, max_context_tokens, over_long, strict)
    if not path.exists():
        raise TraceError(f"no such file, and no bundled trace of that name ({', '.join(BUNDLED)})", path=path)

    chosen = choose_format(path, format, columns)
    files = files_of(path, chosen)
    unknown = options.given() - chosen.takes
    if unknown:
        raise TraceError(f"format {chosen.name} does not take {', '.join(sorted(unknown))}", path=path)
    collected = _Collected(path, strict)
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
            found = [FORMATS[known] for known in candidates(file) if FORMATS[known].sessions_whole]
            if len(found) == 1 and file.match(found[0].pattern):
                return found[0]
        raise TraceError(
            "is a folder without files of a format that is read by the folder: name one", path=path
        )
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
                chunk.line = chunk.line + number * _PER_FILE
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


@dataclass
class _Collected:
    path: Path
    strict: bool
    chunks: list[Chunk] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)
    num_blank: int = 0

    def take(self, chunk: Chunk) -> None:
        for rejected in chunk.rejected:
            self._strictly(rejected, "dropped")
            self.dropped[rejected.reason] += 1
        for changed in chunk.changed:
            self._strictly(changed, "changed")
            self.changed[changed.reason] += 1
        self.notes.update(dict.fromkeys(chunk.notes))
        self.num_blank += chunk.num_blank
        chunk.rejected, chunk.changed = [], []
        self.chunks.append(chunk)

    def _strictly(self, row: Rejected, what: str) -> None:
        if self.strict:
            detail = f" ({row.detail})" if row.detail else ""
            raise TraceError(
                f"{row.reason}{detail}: the row would be {what}, which strict loading refuses",
                path=self.path,
                line=row.line,
            )

    def trace(self, files: list[Path], chosen: Format) -> Trace:
        """Every readable row, in order, before any policy."""
        chunks = self.chunks
        line = _joined([c.line for c in chunks])
        n = len(line)
        time_ns = _joined([c.time_ns for c in chunks])
        inputs = _joined([c.input_tokens for c in chunks])
        session = _joined([_or(c.session, len(c), -1) for c in chunks])
        turn = _joined([_or(c.turn, len(c), 0) for c in chunks])
        parent = _joined([_or(c.parent, len(c), -1) for c in chunks])
        shared = _joined([_or(c.shared_prefix_tokens, len(c), 0) for c in chunks])
        think = np.concatenate(
            [np.zeros(0), *(np.full(len(c), np.nan) if c.think_s is None else c.think_s for c in chunks)]
        )
        blocks = self._blocks(chosen, inputs, line)

        key = sort_keys(time_ns, parent)
        order = np.argsort(key, kind="stable")
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        parent = np.where(parent >= 0, place[np.maximum(parent, 0)], -1)[order]
        stamps = time_ns[order]
        arrival = seconds_from_first(stamps)
        if self.num_blank:
            self.notes[f"{self.num_blank} blank lines passed over"] = None
        block_tokens, offsets, ids = no_blocks(n) if blocks is None else blocks.reordered(order)
        digest = sha256_of(files[0]) if len(files) == 1 else _sha256_of_all(files)
        steps = np.diff(time_ns[time_ns != NO_STAMP])
        return Trace(
            name=self.path.name.split(".")[0],
            format=chosen.name,
            sha256=digest,
            arrival_s=arrival,
            input_tokens=inputs[order],
            output_tokens=_joined([c.output_tokens for c in chunks])[order],
            session=renumber(session[order]),
            turn=turn[order],
            parent=parent,
            think_s=think[order],
            shared_prefix_tokens=shared[order],
            block_tokens=block_tokens,
            block_offsets=offsets,
            block_ids=ids,
            source_line=line[order] % _PER_FILE,
            loading=LoadReport(
                rows_read=n + sum(self.dropped.values()),
                rows_kept=n,
                rows_dropped=dict(self.dropped),
                changed=dict(self.changed),
                inversions=0 if chosen.own_clocks else int((steps < 0).sum()),
                ties=int((steps == 0).sum()),
                notes=tuple(self.notes),
                offered=offered(arrival),
            ),
        )

    def _blocks(self, chosen: Format, inputs: Ints, line: Ints) -> BlockColumns | None:
        sizes = {c.block_tokens for c in self.chunks if len(c)}
        if chosen.block_rule is None or sizes <= {None}:
            return None
        if len(sizes) != 1:
            known = ", ".join(str(size) for size in sorted(s for s in sizes if s is not None))
            raise TraceError(f"mixes block sizes ({known}): split it by size", path=self.path)
        size = sizes.pop()
        assert size is not None
        counts = _joined([_or(c.block_counts, len(c), 0) for c in self.chunks])
        ids = np.concatenate([c.block_ids for c in self.chunks if c.block_ids is not None])
        fitted = fit_block_counts(inputs, counts, ids, size, chosen.block_rule, self.path, chosen.name)
        for reason, rows in fitted.changed.items():
            self._strictly(Rejected(int(line[rows[0]]), reason, ""), "changed")
            self.changed[reason] += len(rows)
        columns, split = intern_blocks(fitted.counts, fitted.ids, size)
        if split:
            self.changed["ids seen behind different prefixes, told apart"] += split
        return columns


def _or(column: Ints | None, n: int, value: int) -> Ints:
    return np.full(n, value, np.int64) if column is None else column


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate([*columns, np.zeros(0, np.int64)])


def _sha256_of_all(files: list[Path]) -> str:
    import hashlib

    return hashlib.sha256("".join(sha256_of(path) for path in files).encode()).hexdigest()


def sort_keys(time_ns: Ints, parent: Ints) -> Ints:
    """Each row's own stamp, but never before its parent's; a row without a stamp takes its parent's. [n]"""
    key = time_ns.copy()
    children = np.flatnonzero(parent >= 0)
    for row in children.tolist():  # in file order, where parents stand first
        key[row] = max(key[row], key[parent[row]])
    return key


def seconds_from_first(stamps: Ints) -> Floats:
    """Seconds after the earliest stamp; NaN where there is none. [n]"""
    known = stamps != NO_STAMP
    arrival = np.full(len(stamps), np.nan)
    if known.any():
        arrival[known] = (stamps[known] - stamps[known].min()) / 1e9
    return arrival


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
