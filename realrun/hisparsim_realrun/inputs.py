"""The inputs of a serving core, call by call, and the core driven by them again.

What a core decides follows from the calls that it got: which requests were submitted between which plans,
which transfers it heard of, how many tokens each step brought back. :class:`RecordedCore` writes them down as
they happen; :func:`redrive` makes the same calls on a fresh core.

| kind | ident | value |
|---|---|---|
| submit | request | prompt tokens; further: output tokens, page keys |
| plan | number of the call | |
| accepted | request | tokens that the next ``complete`` brings it |
| complete | plan | |
| enqueued, done | transfer | |
| notified | | ends a ``notify`` |
| loaded | request | |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import Idle, Outcome, StepPlan, TransferPhase, TransferUpdate
from hisparsim.serving.progress import Completion
from hisparsim.serving.request import Request, RequestSpec

from .decisions import Record, records_of
from .errors import RealRunError


class InputKind(IntEnum):
    SUBMIT = 0
    PLAN = 1
    ACCEPTED = 2
    COMPLETE = 3
    ENQUEUED = 4
    DONE = 5
    NOTIFIED = 6
    LOADED = 7


class Input(NamedTuple):
    """One call, or a part of one."""

    kind: InputKind
    ident: int
    value: int = 0
    output_tokens: int = 0
    page_keys: tuple[int, ...] | None = None


class RecordedCore:
    """A core whose calls and decisions are written down. Everything else is asked of ``core`` itself."""

    def __init__(self, core: ServingCore) -> None:
        self.core = core
        self.inputs: list[Input] = []
        self.decisions: list[Record] = []
        self._num_plans = 0

    def submit(self, spec: RequestSpec) -> Request:
        """Change: queue a request."""
        keys = None if spec.page_keys is None else tuple(spec.page_keys.tolist())
        self.inputs.append(
            Input(InputKind.SUBMIT, spec.request_id, spec.prompt_tokens, spec.output_tokens, keys)
        )
        return self.core.submit(spec)

    def plan(self) -> StepPlan | Idle:
        """Change: decide the next step."""
        plan = self.core.plan()
        self.inputs.append(Input(InputKind.PLAN, self._num_plans))
        self.decisions += records_of(self._num_plans, plan)
        self._num_plans += 1
        return plan

    def complete(self, plan_id: int, outcome: Outcome) -> Completion:
        """Change: bring a step's tokens back."""
        for request_id, count in (outcome.accepted or {}).items():
            self.inputs.append(Input(InputKind.ACCEPTED, request_id, count))
        self.inputs.append(Input(InputKind.COMPLETE, plan_id))
        return self.core.complete(plan_id, outcome)

    def notify(self, updates: Sequence[TransferUpdate]) -> None:
        """Change: transfers moved on."""
        for update in updates:
            enqueued = update.phase is TransferPhase.ENQUEUED
            self.inputs.append(Input(InputKind.ENQUEUED if enqueued else InputKind.DONE, update.transfer_id))
        self.inputs.append(Input(InputKind.NOTIFIED, 0))
        self.core.notify(updates)

    def loaded(self, request_id: int) -> None:
        """Change: a load that a request waits for is complete."""
        self.inputs.append(Input(InputKind.LOADED, request_id))
        self.core.loaded(request_id)


def redrive(core: ServingCore, inputs: Sequence[Input]) -> list[Record]:
    """Change: make the recorded calls on a fresh core; returns its decisions.

    Raises:
        ProtocolError, ValueError: the core refuses a call, so it decided otherwise before.
    """
    decisions: list[Record] = []
    updates: list[TransferUpdate] = []
    accepted: dict[int, int] = {}
    num_plans = 0
    for entry in inputs:
        match entry.kind:
            case InputKind.SUBMIT:
                keys = None if entry.page_keys is None else np.array(entry.page_keys, np.int64)
                core.submit(RequestSpec(entry.ident, entry.value, entry.output_tokens, keys))
            case InputKind.PLAN:
                decisions += records_of(num_plans, core.plan())
                num_plans += 1
            case InputKind.ACCEPTED:
                accepted[entry.ident] = entry.value
            case InputKind.COMPLETE:
                core.complete(entry.ident, Outcome(accepted) if accepted else Outcome())
                accepted = {}
            case InputKind.ENQUEUED:
                updates.append(TransferUpdate(entry.ident, TransferPhase.ENQUEUED))
            case InputKind.DONE:
                updates.append(TransferUpdate(entry.ident, TransferPhase.DONE))
            case InputKind.NOTIFIED:
                core.notify(updates)
                updates = []
            case InputKind.LOADED:
                core.loaded(entry.ident)
    return decisions


def write_inputs(path: Path, inputs: Sequence[Input]) -> None:
    """Change: write ``inputs.parquet``."""
    table = pa.table(
        {
            "kind": pa.array([entry.kind.name.lower() for entry in inputs]).dictionary_encode(),
            "ident": pa.array([entry.ident for entry in inputs], pa.int64()),
            "value": pa.array([entry.value for entry in inputs], pa.int64()),
            "output_tokens": pa.array([entry.output_tokens for entry in inputs], pa.int64()),
            "page_keys": pa.array([entry.page_keys for entry in inputs], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, path, compression="zstd")


def read_inputs(path: Path) -> list[Input]:
    """Query: the inputs that :func:`write_inputs` wrote.

    Raises:
        RealRunError: the file is missing or not such a file.
    """
    try:
        table: dict[str, list[Any]] = pq.read_table(path).to_pydict()
        return [
            Input(InputKind[kind.upper()], ident, value, output, None if keys is None else tuple(keys))
            for kind, ident, value, output, keys in zip(
                *(table[name] for name in ("kind", "ident", "value", "output_tokens", "page_keys")),
                strict=True,
            )
        ]
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise RealRunError(f"{path}: not the inputs of a real run ({error})") from None
