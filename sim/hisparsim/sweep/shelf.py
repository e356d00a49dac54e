"""Traces that several processes read: stored once as plain columns, mapped into memory by each.

A trace is parsed once. Its columns are written as ``.npy`` files that workers map read-only, so that the
pages are shared by the operating system and no run copies them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hisparsim_traces import LoadReport, Trace

_COLUMNS = (
    "arrival_s", "input_tokens", "output_tokens", "session", "turn", "parent", "think_s",
    "shared_prefix_tokens", "block_offsets", "block_ids", "source_line",
)  # fmt: skip
_HEAD = "trace.json"


def put(trace: Trace, directory: Path) -> Path:
    """Change: store the columns of a trace in ``directory``; returns it. Stored again, nothing changes."""
    if (directory / _HEAD).is_file():
        return directory
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in _COLUMNS:
        np.save(partial / f"{name}.npy", np.ascontiguousarray(getattr(trace, name)))
    head = {
        "name": trace.name,
        "format": trace.format,
        "sha256": trace.sha256,
        "block_tokens": trace.block_tokens,
    }
    (partial / _HEAD).write_text(json.dumps(head), encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return directory


def take(directory: Path) -> Trace:
    """Query: the stored trace, its columns mapped read-only. What was dropped on loading is not kept."""
    head: dict[str, Any] = json.loads((directory / _HEAD).read_text(encoding="utf-8"))
    columns: dict[str, Any] = {
        name: np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r")) for name in _COLUMNS
    }
    num = len(columns["input_tokens"])
    return Trace(**head, **columns, loading=LoadReport(num, num))


class Shelf:
    """Stored traces by key, each opened when it is first asked for."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self.directories = dict(directories)
        self._open: dict[str, Trace] = {}

    def __getitem__(self, key: str) -> Trace:
        """Query: the trace of a key."""
        if key not in self._open:
            self._open[key] = take(self.directories[key])
        return self._open[key]
