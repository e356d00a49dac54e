"""Traces that come with the package: seeded draws from descriptions, kept as compressed columns.

Each file of data/ is made by `python -m hisparsim_traces.bundled`; a test draws them again and compares the
bytes. Layout, xz-compressed: one JSON line (name, num_requests, block_tokens, columns and their lengths),
then each column as little-endian int64, differences to the previous value; times in microseconds, NaN as
-1.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from .errors import TraceError
from .trace import Floats, Ints, Trace, columns_sha256

_ORDER = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "session",
    "turn",
    "parent",
    "think_s",
    "shared_prefix_tokens",
    "block_offsets",
    "block_ids",
)
_TIMES = {"arrival_s", "think_s"}


def _described(name: str) -> Callable[[], Trace]:
    def draw() -> Trace:
        from .synth.description import parse_description
        from .synth.draw import synthesise

        return synthesise(parse_description(description_of(name)))

    return draw


def _openhands() -> Trace:
    """The OpenHands shape of vLLM's HiSparse post, in 32 conversations.

    13 turns, 74,160 tokens first, 220 out a turn, and 753 new tokens a later turn, which come on top of the
    output before them (the post counts "new" tokens, and an assistant's own output is not new to it).
    """
    from .synth.shapes import conversations

    return conversations(32, 13, 74_160, 753, 220, name="openhands")


BUNDLED: dict[str, Callable[[], Trace]] = {
    "conversation": _described("conversation"),
    "long-context": _described("long-context"),
    "openhands": _openhands,
    "tool-agent": _described("tool-agent"),
    "code-completion": _described("code-completion"),
    "million-token": _described("million-token"),
}


def description_of(name: str) -> str:
    """The JSON description a bundled trace is drawn from. Raises TraceError where there is none."""
    if name == "openhands":
        raise TraceError(
            "bundled trace 'openhands' is no draw: it is conversations(32, 13, 74_160, 753, 220)"
        )
    return files("hisparsim_traces").joinpath("data", f"{name}.json").read_text("utf-8")


def load_bundled(name: str) -> Trace:
    """A bundled trace from its stored columns."""
    stored = files("hisparsim_traces").joinpath("data", f"{name}.trace.xz").read_bytes()
    return unpack(lzma.decompress(stored))


def pack(trace: Trace) -> bytes:
    """The canonical bytes of a synthetic trace, before compression."""
    columns = [_whole(name, getattr(trace, name)) for name in _ORDER]
    head = {
        "name": trace.name,
        "num_requests": trace.num_requests,
        "block_tokens": trace.block_tokens,
        "columns": [[name, len(column)] for name, column in zip(_ORDER, columns, strict=True)],
    }
    body = b"".join(np.diff(column, prepend=0).astype("<i8").tobytes() for column in columns)
    return json.dumps(head).encode() + b"\n" + body


def unpack(data: bytes) -> Trace:
    """The trace of packed bytes."""
    from .synth.assemble import synthetic_trace

    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    columns: dict[str, Ints] = {}
    at = 0
    for name, length in head["columns"]:
        columns[name] = np.cumsum(np.frombuffer(body, "<i8", length, at), dtype=np.int64)
        at += 8 * length
    trace = synthetic_trace(
        head["name"],
        _seconds(columns["arrival_s"]),
        columns["input_tokens"],
        columns["output_tokens"],
        session=columns["session"],
        turn=columns["turn"],
        parent=columns["parent"],
        think_s=_seconds(columns["think_s"]),
        shared_prefix_tokens=columns["shared_prefix_tokens"],
        blocks=(head["block_tokens"], columns["block_offsets"], columns["block_ids"]),
    )
    return replace(trace, sha256=columns_sha256(trace))


def _whole(name: str, column: Ints | Floats) -> Ints:
    if name not in _TIMES:
        return np.asarray(column, np.int64)
    return np.where(np.isnan(column), -1, np.rint(np.nan_to_num(column) * 1e6)).astype(np.int64)


def _seconds(us: Ints) -> Floats:
    return np.where(us < 0, np.nan, us / 1e6)


def write_all(folder: Path) -> None:
    """Draw every bundled trace again and store it."""
    for name, draw in BUNDLED.items():
        packed = pack(draw())
        (folder / f"{name}.trace.xz").write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    write_all(Path(__file__).parent / "data")
