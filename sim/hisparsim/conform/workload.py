"""A logged workload: its JSON description as limits, lags and a closed loop of users.

The format is that of headless runs of vLLM 0.33's scheduler: ``NAME.json`` with ``workload``, ``config`` and
``totals``, and ``NAME.csv.gz`` with one row a ``schedule()`` call. docs/conformance.md describes each key.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.lockstep import Lags
from hisparsim.serving.request import RequestSpec

_PAGE = 64
_SHIFT = 32
_WORKLOAD_KEYS = (
    "hisparse", "async", "concurrency", "num_requests", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "enq_lag", "done_lag",
)  # fmt: skip
_CONFIG_KEYS = ("num_gpu_blocks", "gpu_block_bytes")
_HYBRID_KEYS = ("host_blocks", "resident_groups", "hot_blocks_per_request")
_SHAPES = (("mix",), ("turns", "first", "later", "osl"), ("isl", "osl"))


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
    """By submission: [id, prompt tokens, admission step, hit tokens then, finish step, host hit tokens]."""
    preemptions: list[list[Any]]
    """The first ones: [step, id, computed tokens, known tokens, free GPU blocks, free host blocks]."""
    columns: tuple[str, ...]
    rows: list[tuple[int, ...]]

    @property
    def policy(self) -> str:
        return "hybrid" if self.workload["hisparse"] else "gpu-only"

    @property
    def policy_options(self) -> dict[str, Any]:
        offload = self.workload["hisparse"] and self.workload.get("indexer_offload", False)
        return {"indexer_offload": True} if offload else {}

    @property
    def lags(self) -> Lags:
        work = self.workload
        return Lags(work["enq_lag"], work["done_lag"], work.get("load_lag", 2))

    @property
    def limits(self) -> ServingLimits:
        """Pool sizes as the engine resolved them, limits as the workload asked for them."""
        work, config = self.workload, self.config
        groups = config["resident_groups"] if work["hisparse"] else 0
        layers = sum(config.get("group_layer_counts") or ())
        return ServingLimits(
            num_blocks=config["num_gpu_blocks"],
            max_num_seqs=work["max_num_seqs"],
            max_num_batched_tokens=work["max_num_batched_tokens"],
            max_model_len=work["max_model_len"],
            page_tokens=_PAGE,
            num_groups=groups,
            hot_pages=config["hot_blocks_per_request"] // groups if groups else 0,
            hot_rows=config.get("hot_rows") or work.get("hot", 0) if groups else 0,
            num_host_blocks=config.get("host_blocks") or 0,
            block_bytes=config["gpu_block_bytes"],
            host_block_bytes=work.get("row", 0) * _PAGE * layers,
            async_depth=2 if work["async"] else 1,
            watermark=config.get("watermark", 0.0),
            draft_tokens=work.get("mtp") or 0,
        )

    @property
    def is_complete(self) -> bool:
        """Whether the log goes on until every request has finished (it may have been cut short)."""
        expected = self.workload["num_requests"] * (self.workload.get("turns") or 1)
        finished = self.columns.index("finished") if "finished" in self.columns else None
        return bool(self.rows) and finished is not None and self.rows[-1][finished] >= expected

    def users(self) -> ClosedLoop:
        return ClosedLoop(self.name, self.workload, [entry[1] for entry in self.requests])

    def row(self, step: int) -> dict[str, int]:
        """Column -> value in one step."""
        return dict(zip(self.columns, self.rows[step], strict=True))


class ClosedLoop:
    """``concurrency`` users; a finished request is replaced at once until all have been submitted.

    Prompts are unique; a conversation's turn repeats the whole context before it and adds new tokens.
    """

    def __init__(self, name: str, workload: Mapping[str, Any], prompts: list[int]) -> None:
        self.name = name
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
        if work.get("mix"):
            prompt, output = self._drawn(conversation)
        elif work.get("turns"):
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

    def _drawn(self, conversation: int) -> tuple[int, int]:
        order = self.workload.get("mix_order")
        if order is not None:
            prompt, output = order[conversation]
            return prompt, output
        if conversation >= len(self.prompts):
            # The engine did not get so far in its log: our run has diverged, any length will do.
            return self.prompts[-1], self._output(self.prompts[-1])
        return self.prompts[conversation], self._output(self.prompts[conversation])

    def _output(self, prompt: int) -> int:
        outputs = {out for length, out in self.workload["mix"] if length == prompt}
        if len(outputs) != 1:
            raise LogError(
                f"log {self.name}: {len(outputs)} output lengths in 'mix' go with a prompt of {prompt}; "
                "add 'mix_order', the list of [prompt, output] in order of submission"
            )
        return int(outputs.pop())


def read_log(json_path: Path) -> LoggedWorkload:
    """Read ``NAME.json`` and the ``NAME.csv.gz`` beside it.

    Raises:
        LogError: a file is missing, unreadable, or lacks a key, a column or a cell.
    """
    name = json_path.stem
    csv_path = json_path.with_name(f"{name}.csv.gz")
    try:
        data = json.loads(json_path.read_text(encoding="utf-8"))
        with gzip.open(csv_path, "rt", newline="", encoding="utf-8") as stream:
            reader = csv.reader(stream)
            columns = tuple(next(reader))
            rows = [tuple(map(int, row)) for row in reader]
    except (OSError, ValueError, StopIteration, EOFError) as error:
        raise LogError(f"log {name}: {error} (needs {json_path.name} and {csv_path.name})") from error
    _check(name, data, columns, rows)
    return LoggedWorkload(
        name,
        data["workload"],
        data["config"],
        data["totals"],
        data["requests"],
        data.get("preempt_events", []),
        columns,
        rows,
    )


def _check(name: str, data: Any, columns: tuple[str, ...], rows: list[tuple[int, ...]]) -> None:
    def lacks(keys: Iterable[str], where: Any, what: str) -> None:
        missing = [key for key in keys if not isinstance(where, dict) or key not in where]
        if missing:
            raise LogError(
                f"log {name}: {what} lacks {missing[0]!r}; docs/conformance.md describes the format"
            )

    lacks(("workload", "config", "totals", "requests"), data, f"{name}.json")
    work = data["workload"]
    lacks(_WORKLOAD_KEYS, work, "'workload'")
    lacks(_CONFIG_KEYS + (_HYBRID_KEYS if work["hisparse"] else ()), data["config"], "'config'")
    shape = next((keys for keys in _SHAPES if work.get(keys[0])), _SHAPES[-1])
    lacks(shape, work, "'workload'")
    lacks(("step",), dict.fromkeys(columns), f"the header of {name}.csv.gz")
    for number, row in enumerate(rows):
        if len(row) != len(columns) or row[columns.index("step")] != number:
            raise LogError(
                f"log {name}: row {number} of {name}.csv.gz is not step {number} with {len(columns)} columns"
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
    found = [path for path in paths if only is None or path.stem == only]
    if not found:
        named = f"named {only!r} " if only is not None else ""
        known = f" (there are: {', '.join(path.stem for path in paths)})" if paths else ""
        raise LogError(f"no decision log {named}in {str(folder)!r}{known}")
    return found
