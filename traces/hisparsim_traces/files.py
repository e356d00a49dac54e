"""Bytes of a trace file: plain, gzip or zstd, told apart by their first bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from .errors import TraceError

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # a 1M-token prompt has 65,536 16-token block ids, about 0.7 MB of JSON

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Gzip(gzip.GzipFile):
    """Reads a gzip file and closes the file below with itself."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


def open_bytes(path: Path) -> IO[bytes]:
    """A binary reader of the content; raises TraceError where the file cannot be opened."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", path=path) from error
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(_GZIP):
        return cast(IO[bytes], _Gzip(raw))
    if magic == _ZSTD:
        try:
            import zstandard
        except ModuleNotFoundError:
            raw.close()
            raise TraceError("is zstd-compressed: pip install 'hisparsim[zstd]'", path=path) from None
        reader: Any = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader)
    return raw


def read_some(stream: IO[bytes], size: int, path: Path) -> bytes:
    """Up to `size` bytes; damaged compression raises TraceError instead of its library's error."""
    try:
        return stream.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"damaged or cut-short compressed data ({error})", path=path) from error
    except Exception as error:
        if type(error).__module__.startswith("zstd"):  # zstandard is optional, so it is not imported here
            raise TraceError(f"damaged zstd data ({error})", path=path) from error
        raise


def sha256_of(path: Path) -> str:
    """sha256 of the bytes as stored (compressed ones included)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as raw:
            while piece := raw.read(CHUNK_BYTES):
                digest.update(piece)
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", path=path) from error
    return digest.hexdigest()


def line_batches(path: Path) -> Iterator[list[bytes]]:
    """The lines in order, without their ends, in batches of about a MiB. The last may lack its newline."""
    with open_bytes(path) as stream:
        rest = b""
        while piece := read_some(stream, CHUNK_BYTES, path):
            rest += piece
            lines = rest.split(b"\n")
            rest = lines.pop()
            if len(rest) > MAX_LINE_BYTES:
                raise TraceError(
                    f"has a line above {MAX_LINE_BYTES >> 20} MiB: not a line-oriented trace", path=path
                )
            if lines:
                yield lines
        if rest:
            yield [rest]


def sample(path: Path, size: int = 1 << 16) -> bytes:
    """The first bytes of the content, for detection."""
    with open_bytes(path) as stream:
        return read_some(stream, size, path)
