"""Public traces: what exists, under which licence, how large, where it lives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from .errors import TraceError


@dataclass(frozen=True)
class Entry:
    """A public trace.

    Attributes:
        format: a name of FORMATS, or None where no reader here takes it.
        size_bytes: as published, rounded where only megabytes are, None where not known.
        page: where people find it.
        url: a file that can be fetched as it is; None where the page must be visited (an archive, an
            account).
        sha256: of that file, as its publishers or several who fetched it give it; None where none is known.
        attribution: what the licence or the authors ask to be said.
    """

    name: str
    title: str
    format: str | None
    licence: str
    size_bytes: int | None
    page: str
    url: str | None
    sha256: str | None
    attribution: str
    note: str


def catalogue() -> dict[str, Entry]:
    """Every entry by name."""
    text = files("hisparsim_traces").joinpath("data", "catalogue.json").read_text("utf-8")
    return {entry["name"]: Entry(**entry) for entry in json.loads(text)}


def find(name: str) -> Entry:
    """Raises TraceError, with the known names, where there is no such entry."""
    known = catalogue()
    if name not in known:
        raise TraceError(f"no public trace {name!r} in the catalogue: one of {', '.join(known)}")
    return known[name]
