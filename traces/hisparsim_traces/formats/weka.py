"""WEKA / AgentX conversations: one JSON object each (a file, a line, or a folder of files), with nested
sub-agents.

Every conversation has a clock of its own that starts at 0 (seconds), a sub-agent's calls again one that
starts at 0 where the sub-agent starts. The sub-agent marker's `t` is its *end*: in the public traces, t -
duration_ms of sub-agents launched together agree to 15 ms and follow the launching call's end. Blocks are
64 tokens; the partial tail has no id, and one that is there is cut off. Ids are local to the conversation
unless hash_id_scope is global.

A call waits for the call before it. After a sub-agent that had ended by then, the call waits for that
sub-agent's last call instead, if it ended later; its think time counts from there, so waiting for the
sub-agent (which the recorded think_time contains) is not counted twice.

A call's kind is its `type` (n or s), and "subagent" for a sub-agent's calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..builder import BadRow, Builder
from ..errors import TraceError
from ..files import open_bytes, read_some
from ..jsonl import Row, parse_object, read_jsonl, seconds, stamp_ns, tokens
from ..rows import Chunk, Format, Head, Options

BLOCK_TOKENS = 64
MAX_PRETTY_BYTES = 512 << 20
_NOTE = "conversations have clocks of their own: each starts at 0"


@dataclass
class _Call:
    """The latest call on one line of dependence: its row and when it ended on the conversation's clock."""

    row: int
    end_s: float


class _Reader:
    def __init__(self, options: Options) -> None:
        self.builder = Builder(blocks=True, sessions=True, kinds=True)
        self.options = options
        self.size: int | None = options.block_tokens
        self.num_calls = 0
        self.num_sessions = 0
        self.num_ids = 0
        self.global_ids: dict[int, int] = {}

    def conversation(self, line: int, obj: Row) -> None:
        """Add every call of a conversation. Raises BadRow where it is none at all."""
        requests = obj.get("requests")
        if type(requests) is not list:
            raise BadRow("no requests", "a conversation has a list of requests")
        scope = obj.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadRow("unknown hash_id_scope", repr(scope)[:40])
        if self.options.block_tokens is None:
            size = tokens(obj, "block_size") if "block_size" in obj else BLOCK_TOKENS
            if size < 1 or (self.size is not None and size != self.size):
                raise BadRow("other block_size", f"{size}, the file's is {self.size}")
            self.size = size
        first_id = len(self.builder.block_ids)
        session = self.num_sessions
        before = len(self.builder)
        self._calls(requests, session, None, 0.0, depth=0)
        self.num_sessions += len(self.builder) > before
        self._rescope(first_id, scope)

    def take(self) -> Chunk:
        return self.builder.take(block_tokens=self.size, notes=(_NOTE,))

    def _calls(
        self, requests: list[Any], session: int, last: _Call | None, start_s: float, depth: int
    ) -> _Call | None:
        """Add the calls of one agent, whose clock starts at `start_s`. Returns its last one."""
        if depth > 8:
            raise BadRow("sub-agents nested deeper than 8")
        done: list[_Call] = []  # sub-agents' last calls that no call here has waited for yet
        for request in requests:
            if type(request) is not dict:
                self._reject(BadRow("not a JSON object"))
            elif "requests" in request or request.get("type") == "subagent":
                ended = self._sub_agent(request, session, last, start_s, depth)
                if ended is not None:
                    done.append(ended)
            else:
                try:
                    last = self._call(request, session, last, done, start_s, depth)
                except BadRow as bad:
                    self._reject(bad)
        return last

    def _sub_agent(
        self, marker: Row, session: int, last: _Call | None, start_s: float, depth: int
    ) -> _Call | None:
        nested = marker.get("requests")
        try:
            if type(nested) is not list:
                raise BadRow("sub-agent without requests")
            end_s = start_s + stamp_ns(marker, "t", "s") / 1e9
            duration_ms = seconds(marker, "duration_ms")
        except BadRow as bad:
            self._reject(bad)
            return None
        begin_s = max(end_s - (duration_ms or 0.0) / 1e3, 0.0)
        ended = self._calls(nested, session, last, begin_s, depth + 1)
        if ended is None or ended is last:
            return None
        return _Call(ended.row, max(ended.end_s, end_s) if math.isfinite(ended.end_s) else end_s)

    def _call(
        self, request: Row, session: int, last: _Call | None, done: list[_Call], start_s: float, depth: int
    ) -> _Call:
        number = self.num_calls + 1
        begin_ns = stamp_ns(request, "t", "s") + round(start_s * 1e9)
        begin_s = begin_ns / 1e9
        inputs, outputs = tokens(request, "in"), tokens(request, "out")
        service_s = seconds(request, "api_time")
        if service_s is not None and service_s < 0:
            self.builder.change(number, "negative api_time, taken as unknown", f"{service_s:g} s")
            service_s = None
        ids = request.get("hash_ids", [])
        if type(ids) is not list:
            raise BadRow("unreadable hash_ids", f"a list is expected, found {type(ids).__name__}")
        parent = last
        for other in list(done):
            if other.end_s <= begin_s + 1.0:  # stamps are whole seconds, sub-agents' ends are not
                done.remove(other)
                if parent is None or not parent.end_s > other.end_s:
                    parent = other
        think_s = float("nan")
        if parent is not None:
            think_s = begin_s - parent.end_s
            if think_s < -1.0:
                self.builder.change(number, "started before the call it waits for ended", f"{-think_s:.1f} s")
            think_s = max(think_s, 0.0) if not math.isnan(think_s) else _think(request)
        row = self.builder.add(
            number,
            begin_ns,
            inputs,
            outputs,
            ids,
            session=session,
            turn=self._turn(session),
            parent=-1 if parent is None else parent.row,
            think_s=think_s,
            kind="subagent" if depth else request.get("type"),
        )
        self.num_calls = number
        return _Call(row, float("nan") if service_s is None else begin_s + service_s)

    def _turn(self, session: int) -> int:
        if not self.builder.session or self.builder.session[-1] != session:
            return 0
        return self.builder.turn[-1] + 1

    def _reject(self, bad: BadRow) -> None:
        self.num_calls += 1
        self.builder.reject(self.num_calls, bad)

    def _rescope(self, first: int, scope: object) -> None:
        """Give the conversation's ids numbers of the whole file."""
        ids = np.frombuffer(self.builder.block_ids.tobytes(), np.uint64)[first:]
        distinct, inverse = np.unique(ids, return_inverse=True)
        if scope == "global":
            numbers = []
            for one in distinct.tolist():
                if one not in self.global_ids:
                    self.global_ids[one] = self.num_ids
                    self.num_ids += 1
                numbers.append(self.global_ids[one])
            mapped = np.array(numbers, np.uint64)[inverse]
        else:
            mapped = (inverse + self.num_ids).astype(np.uint64)
            self.num_ids += len(distinct)
        del self.builder.block_ids[first:]
        self.builder.block_ids.frombytes(mapped.tobytes())


def _think(request: Row) -> float:
    """The recorded pause, where the call before has no recorded end."""
    pause = seconds(request, "think_time")
    return float("nan") if pause is None or pause < 0 else pause


def read(path: Path, options: Options) -> Iterator[Chunk]:
    reader = _Reader(options)
    with open_bytes(path) as stream:
        beginning = read_some(stream, 1 << 16, path)
    if beginning.lstrip().split(b"\n", 1)[0].strip() in (b"{", b"[") or not _lines(path):
        with open_bytes(path) as stream:
            content = read_some(stream, MAX_PRETTY_BYTES + 1, path)
        if len(content) > MAX_PRETTY_BYTES:
            raise TraceError(
                "is one JSON value above 512 MiB: write one conversation a line instead", path=path
            )
        yield from _whole(content, reader, path)
        return

    def row(line: int, obj: Row) -> None:
        try:
            reader.conversation(line, obj)
        except BadRow as bad:
            reader._reject(BadRow(bad.reason, f"conversation on line {line}; {bad.detail}"))

    yield from read_jsonl(path, reader.builder, row, reader.take)


def _lines(path: Path) -> bool:
    """Whether the first line is an object by itself."""
    from ..files import line_batches

    for lines in line_batches(path):
        for line in lines:
            if line.strip():
                try:
                    parse_object(line)
                except BadRow:
                    return False
                return True
    return False


def _whole(content: bytes, reader: _Reader, path: Path) -> Iterator[Chunk]:
    """A file that is one conversation, or a list of them, over several lines."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is not JSON ({str(error)[:120]})", path=path) from error
    for number, obj in enumerate(value if type(value) is list else [value], 1):
        try:
            if type(obj) is not dict:
                raise BadRow("not a JSON object")
            reader.conversation(number, obj)
        except BadRow as bad:
            reader._reject(bad)
        yield reader.take()


def recognise(head: Head) -> bool:
    if head.kind != "json":
        return False
    if head.first:
        return "requests" in head.keys and bool(head.keys & {"hash_id_scope", "block_size", "models"})
    return head.keys >= {"requests", "in", "out", "t"} or head.keys >= {"requests", "hash_id_scope"}


FORMAT = Format(
    "weka",
    "WEKA / AgentX conversations",
    read,
    recognise,
    block_rule="floor",
    takes=frozenset({"block_tokens"}),
    sessions_whole=True,
    pattern="*.json*",
    own_clocks=True,
)
