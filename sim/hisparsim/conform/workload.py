"""A logged workload: its JSON description as limits, lags and a closed loop of users.

The format is that of headless runs of vLLM 0.33's scheduler: ``NAME.json`` with ``workload``, ``config`` and
``totals``, and ``NAME.csv.gz`` with one row a ``schedule()`` call. docs/conformance.md describes each key.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.lockstep import Lags
from hisparsim.serving.request import RequestSpec

_PAGE = 64
_SHIFT = 32


class LogError(ValueError):
    """A decision log cannot be read; one line says which file, what and what to do."""


@dataclass(frozen=True)
class LoggedWorkload:
    """One log: what was run, with which resolved sizes, and what the engine decided."""

    name: str
    workload: dict[str, Any]
    config: dict[str, Any]
    totals: dict[str, Any]
    requests: list[list[Any]]
    columns: tuple[str, ...]
    rows: list[tuple[int, ...]]

    @property
    def policy(self) -> str:
        return "hybrid" if self.workload["hisparse"] else "gpu-only"

    @property
    def lags(self) -> Lags:
        work = self.workload
        return Lags(work["enq_lag"], work["done_lag"], work.get("load_lag", 2))

    @property
    def limits(self) -> ServingLimits:
        """Pool sizes as the engine resolved them, limits as the workload asked for them."""
        work, config = self.workload, self.config
        hot_rows = config.get("hot_rows") or work["hot"]
        groups = config.get("resident_groups", 0) if work["hisparse"] else 0
        return ServingLimits(
            num_blocks=config["num_gpu_blocks"],
            max_num_seqs=work["max_num_seqs"],
            max_num_batched_tokens=work["max_num_batched_tokens"],
            max_model_len=work["max_model_len"],
            page_tokens=_PAGE,
            num_groups=groups,
            hot_pages=config.get("hot_blocks_per_request", 0) // groups if groups else 0,
            hot_rows=hot_rows if groups else 0,
            num_host_blocks=config.get("host_blocks") or 0,
            block_bytes=config["gpu_block_bytes"],
            async_depth=2 if work["async"] else 1,
            watermark=config.get("watermark", 0.0),
            draft_tokens=work.get("mtp", 0) or 0,
        )

    def users(self) -> ClosedLoop:
        return ClosedLoop(self.workload, [entry[1] for entry in self.requests])


class ClosedLoop:
    """``concurrency`` users; a finished request is replaced at once until all have been submitted.

    Prompts are unique; a conversation's turn repeats the whole context before it and adds new tokens.
    """

    def __init__(self, workload: dict[str, Any], prompts: list[int]) -> None:
        self.workload = workload
        self.prompts = prompts
        """Prompt tokens by request, in order of submission: a mix is drawn, and the log says what came."""
        self.turns: int = workload.get("turns") or 1
        self._started = 0
        self._next_id = 1
        self._conversation: dict[int, tuple[int, int, int]] = {}  # request -> conversation, turn, context

    def first(self) -> list[RequestSpec]:
        count = min(self.workload["concurrency"], self.workload["num_requests"])
        return [self._start() for _ in range(count)]

    def after(self, request_id: int) -> RequestSpec | None:
        conversation, turn, context = self._conversation.pop(request_id)
        if turn + 1 < self.turns:
            return self._spec(conversation, turn + 1, context)
        return self._start() if self._started < self.workload["num_requests"] else None

    def _start(self) -> RequestSpec:
        conversation = self._started
        self._started += 1
        return self._spec(conversation, 0, 0)

    def _spec(self, conversation: int, turn: int, context: int) -> RequestSpec:
        work = self.workload
        if "mix" in work:
            prompt = self.prompts[conversation]
            output = next(out for length, out in work["mix"] if length == prompt)
        elif "turns" in work:
            prompt = work["first"] if turn == 0 else context + work["later"]
            output = work["osl"]
        else:
            prompt, output = work["isl"], work["osl"]
        request_id = self._next_id
        self._next_id += 1
        self._conversation[request_id] = (conversation, turn, prompt + output)
        num_pages = (prompt + output) // _PAGE
        keys = (np.int64(conversation) << _SHIFT) + np.arange(num_pages, dtype=np.int64)
        return RequestSpec(request_id, prompt, output, keys)


def read_log(json_path: Path) -> LoggedWorkload:
    """Read ``NAME.json`` and the ``NAME.csv.gz`` beside it.

    Raises:
        LogError: a file is missing, unreadable, or lacks a key or the header.
    """
    name = json_path.stem
    csv_path = json_path.with_name(f"{name}.csv.gz")
    try:
        data = json.loads(json_path.read_text())
        with gzip.open(csv_path, "rt", newline="") as stream:
            reader = csv.reader(stream)
            columns = tuple(next(reader))
            rows = [tuple(map(int, row)) for row in reader]
    except (OSError, ValueError, StopIteration, EOFError) as error:
        raise LogError(f"log {name}: {error} (needs {json_path.name} and {csv_path.name})") from error
    missing = [key for key in ("workload", "config", "totals", "requests") if key not in data]
    if missing or "step" not in columns:
        what = f"key {missing[0]!r}" if missing else "column 'step'"
        raise LogError(f"log {name}: {what} is missing; see docs/conformance.md for the format")
    return LoggedWorkload(
        name, data["workload"], data["config"], data["totals"], data["requests"], columns, rows
    )


def find_logs(folder: Path, only: str | None = None) -> list[Path]:
    """The logs of a folder, by name.

    Raises:
        LogError: no folder, no log in it, or none with that name.
    """
    if not folder.is_dir():
        raise LogError(f"{str(folder)!r} is not a folder of decision logs (NAME.json with NAME.csv.gz)")
    paths = sorted(
        path for path in folder.glob("*.json") if path.with_suffix("").with_suffix(".csv.gz").exists()
    )
    if only is not None:
        paths = [path for path in paths if path.stem == only]
    if not paths:
        what = f"named {only!r} " if only else ""
        raise LogError(f"no decision log {what}in {str(folder)!r}")
    return paths
