"""Downloading a public trace: resumed where it broke off, refused where its hash is wrong."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Entry
from .errors import TraceError
from .files import sha256_of

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Fetched:
    """A file that arrived whole, `resumed_bytes` of it before this call, over `attempts` connections."""

    path: Path
    sha256: str
    size_bytes: int
    resumed_bytes: int
    attempts: int


def fetch(
    entry: Entry,
    folder: Path,
    *,
    sha256: str | None = None,
    unpinned: bool = False,
    attempts: int = 5,
    timeout_s: float = 30.0,
    progress: Callable[[int, int | None], None] | None = None,
) -> Fetched:
    """Download an entry into a folder, with its licence beside it.

    A partial file is kept as NAME.part and continued by a later call. A file that is already there with the
    right hash is left as it is.

    Args:
        sha256: the hash to demand, instead of the catalogue's.
        unpinned: accept a file whose hash nobody knows; it is computed and returned.
        attempts: connections before giving up; every one continues where the last broke off.
        progress: called with (bytes so far, bytes in all or None).

    Raises:
        TraceError: nothing to fetch, no hash to check, the server refuses, the connection stays broken, or
            the hash is wrong (the file is then removed).
    """
    if entry.url is None:
        raise TraceError(f"{entry.name} cannot be fetched as one file: see {entry.page}")
    wanted = (sha256 or entry.sha256 or "").lower()
    if not wanted and not unpinned:
        raise TraceError(
            f"the sha256 of {entry.name} is not known here: give it (--sha256), or accept any (--unpinned)"
        )
    if wanted and (len(wanted) > 64 or any(digit not in "0123456789abcdef" for digit in wanted)):
        raise TraceError(f"sha256 {wanted[:70]!r}: up to 64 hexadecimal digits")
    if attempts < 1:
        raise TraceError(f"attempts {attempts}: must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / entry.url.rsplit("/", 1)[-1]
    if target.exists() and wanted and sha256_of(target).startswith(wanted):
        return Fetched(target, sha256_of(target), target.stat().st_size, target.stat().st_size, 0)
    part = target.with_name(target.name + ".part")
    resumed = part.stat().st_size if part.exists() else 0
    made = _download(entry.url, part, attempts, timeout_s, progress)
    digest = sha256_of(part)
    if wanted and not digest.startswith(wanted):
        part.unlink()
        raise TraceError(
            f"{entry.url} has sha256 {digest}, not {wanted}{'...' if len(wanted) < 64 else ''}: it is "
            "another file than the one that was published, and was removed"
        )
    part.replace(target)
    target.with_name(target.name + ".LICENCE.txt").write_text(
        f"{entry.title}\n{entry.page}\nLicence: {entry.licence}\n{entry.attribution}\n", "utf-8"
    )
    return Fetched(target, digest, target.stat().st_size, resumed, made)


def _download(
    url: str,
    part: Path,
    attempts: int,
    timeout_s: float,
    progress: Callable[[int, int | None], None] | None,
) -> int:
    """Bring the part to its full length; returns the connections made."""
    problem = "no answer"
    for attempt in range(1, attempts + 1):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                total = _total(answer, have)
                mode = "ab" if have and answer.status == 206 else "wb"
                with part.open(mode) as out:
                    while piece := answer.read(_PIECE_BYTES):
                        out.write(piece)
                        if progress is not None:
                            progress(out.tell(), total)
            size = part.stat().st_size
            if total is None or size == total:
                return attempt
            if size > total:
                part.unlink()
                problem = f"{size} bytes of {total} were there; started again"
            else:
                problem = f"broke off after {size} of {total} bytes"
        except urllib.error.HTTPError as error:
            if error.code == 416 and have:  # the part is longer than the file, or already whole
                if error.headers.get("Content-Range", "").rsplit("/", 1)[-1] == str(have):
                    return attempt
                part.unlink()
                problem = "the partial file did not fit and was removed"
                continue
            if error.code < 500:
                raise TraceError(f"{url} is refused with {error.code} {error.reason}") from error
            problem = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)[:160] or type(error).__name__
    raise TraceError(f"{url} could not be fetched in {attempts} attempts ({problem}); run again to continue")


def _total(answer: http.client.HTTPResponse, have: int) -> int | None:
    """The whole file's size as the answer tells it."""
    if answer.status == 206:
        whole = answer.headers.get("Content-Range", "").rsplit("/", 1)[-1]
        return int(whole) if whole.isdigit() else None
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None
