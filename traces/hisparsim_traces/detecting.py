"""Which format a file is, from its content alone."""

from __future__ import annotations

import re
from pathlib import Path

from .builder import BadRow
from .csvbatches import header_of
from .errors import TraceError
from .files import sample
from .formats import FORMATS
from .jsonl import NO_LINES, Row, parse_object
from .rows import Head

_KEY = re.compile(rb'"([A-Za-z_][\w ./-]{0,63})"\s*:')


def read_head(path: Path) -> Head:
    """The beginning of a file, taken apart. Raises TraceError where it is empty or binary."""
    raw = sample(path)
    if raw.startswith(b"PAR1"):
        return Head(path, "parquet", (), frozenset(), (), raw)
    text = raw.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise TraceError("is empty", path=path)
    if text[:1] in (b"{", b"["):
        rows = _first_rows(text)
        if rows:
            return Head(path, "json", (), frozenset(rows[0]), rows, raw)
        # cut by the sample's end, or one value over several lines: its keys must do
        keys = frozenset(key.decode() for key in _KEY.findall(text))
        whole = text[:1] == b"[" or text.split(b"\n", 1)[0].strip() == b"{"
        return Head(path, "json", (), keys, (), raw, whole)
    if raw[:64].count(b"\0") in (31, 32, 33) and raw[:64].replace(b"\0", b"").isascii():
        raise TraceError("looks like UTF-16 text: convert it first (iconv -f UTF-16 -t UTF-8)", path=path)
    if b"\0" in raw:
        raise TraceError("is binary, and neither gzip, zstd nor Parquet", path=path)
    return Head(path, "csv", header_of(text), frozenset(), (), raw)


def _first_rows(text: bytes) -> tuple[Row, ...]:
    """The first complete objects; none where the first line is no object."""
    rows: list[Row] = []
    for line in [line for line in text.split(b"\n") if line.strip()][:32]:
        try:
            rows.append(parse_object(line))
        except BadRow:
            if not rows:
                return ()
    return tuple(rows)


def require_whole_parquet(path: Path) -> None:
    """Raise TraceError where a file that begins as Parquet cannot be read as such."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.ParquetFile(path).close()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"is damaged or cut-short Parquet ({error}): fetch or write it again", path=path
        ) from None


def candidates(path: Path) -> list[str]:
    """Names of every format the file's beginning fits."""
    head = read_head(path)
    return [format.name for format in FORMATS.values() if format.recognise(head)]


def detect(path: str | Path) -> str:
    """The one format a file is.

    Raises:
        TraceError: no format fits, or more than one does; the message names the candidates and `--format`.
    """
    path = Path(path)
    head = read_head(path)
    found = [format.name for format in FORMATS.values() if format.recognise(head)]
    if found and head.whole and not any(FORMATS[name].sessions_whole for name in found):
        raise TraceError(NO_LINES, path=path)
    if len(found) == 1:
        return found[0]
    if found:
        raise TraceError(f"may be {' or '.join(found)}: say which with --format", path=path)
    if head.kind == "parquet":
        require_whole_parquet(path)
    seen = ", ".join(head.header[:12] if head.kind == "csv" else sorted(head.keys)[:12]) or head.kind
    raise TraceError(
        f"is no format known here (found {seen[:200]}): name one of {', '.join(FORMATS)} with --format, "
        "or describe its columns with --map",
        path=path,
    )
