"""Bytes of a trace file: plain, gzip or zstd, told apart by their first bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from .errors import TraceError

CHUNK_BYTES = 1 << 20
_PACKED_BYTES = 1 << 14
MAX_LINE_BYTES = 64 << 20  # a 1M-token prompt has 65,536 16-token block ids, about 0.7 MB of JSON

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class _Gzip(gzip.GzipFile):
    """Reads a gzip file and closes the file below with itself."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Zstd(io.RawIOBase):
    """Reads zstd frames, one after the other; a damaged one, or one that ends early, raises EOFError."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw = raw
        self._zstandard = zstandard
        self._frame: Any = None  # the one being read, None between frames
        self._packed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._raw.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a zstd frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._plain = memoryview(self._frame.decompress(self._packed))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(target), len(self._plain))
        target[:size], self._plain = self._plain[:size], self._plain[size:]
        return size

    def close(self) -> None:
        super().close()
        self._raw.close()


def exists(path: Path) -> bool:
    """Whether there is such a file or folder. Raises TraceError where that cannot be told."""
    try:
        return path.exists()
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", path=path) from error


def open_raw(path: Path) -> IO[bytes]:
    """A binary reader of the bytes as stored. Raises TraceError where they cannot be read, or are no file:
    a pipe or device cannot be read a second time.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise TraceError("is a pipe or a device: write its content to a file first", path=path)
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", path=path) from error


def open_bytes(path: Path) -> IO[bytes]:
    """A binary reader of the content; raises TraceError where the file cannot be opened, or is UTF-16."""
    raw = open_raw(path)
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
        return io.BufferedReader(_Zstd(raw, zstandard))
    if magic.startswith(_UTF16):
        raw.close()
        raise TraceError("is UTF-16 text: convert it first (iconv -f UTF-16 -t UTF-8)", path=path)
    return raw


def read_some(stream: IO[bytes], size: int, path: Path) -> bytes:
    """Up to `size` bytes; damaged compression raises TraceError instead of its library's error."""
    try:
        return stream.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"damaged or cut-short compressed data ({error})", path=path) from error


def sha256_of(path: Path) -> str:
    """sha256 of the bytes as stored (compressed ones included)."""
    digest = hashlib.sha256()
    with open_raw(path) as raw:
        while piece := read_some(raw, CHUNK_BYTES, path):
            digest.update(piece)
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
