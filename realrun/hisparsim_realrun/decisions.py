"""The decision log: what a serving core decided, plan by plan, as comparable records.

One record is a tuple of ints and strings: the number of the ``plan()`` call, what kind of decision, and all
that the decision says (arrays as tuples). A simulated run, a run in lockstep and a real one have equal logs
exactly when they made the same decisions in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.plan import Idle, StepPlan

Record = tuple[Any, ...]


def records_of(number: int, plan: StepPlan | Idle) -> list[Record]:
    """Query: the records of the ``number``-th call of ``plan()``."""
    if isinstance(plan, Idle):
        return [(number, "idle", plan.reason)]
    records: list[Record] = [(number, type(action).__name__, *_values(action)) for action in plan.actions]
    records.append((number, "decodes", *_values(plan.decodes)))
    records += [(number, "prefill", *_values(chunk)) for chunk in plan.prefills]
    records.append((number, "step", plan.plan_id, plan.mirrored_tokens, plan.graph_bucket))
    return records


def _values(record: Any) -> Iterable[Any]:
    for field in fields(record):
        yield _frozen(getattr(record, field.name))


def _frozen(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def decision_columns(records: Iterable[Record]) -> dict[str, NDArray[Any]]:
    """Query: the log as columns for ``decisions.parquet``: plan, kind, request and a digest of the record."""
    rows = list(records)
    texts = [repr(row) for row in rows]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    first = [row[2] if isinstance(row[2], int) else -1 for row in rows]
    if_transfer = [
        row[3] if row[1] in ("WriteBack", "Load") else value for row, value in zip(rows, first, strict=True)
    ]
    kinds = [row[1] for row in rows]
    return {
        "plan": np.array([row[0] for row in rows], np.int64),
        "kind": np.array(kinds, dtype=object),
        "request_id": np.array(
            [
                value if kind[0].isupper() or kind == "prefill" else -1
                for kind, value in zip(kinds, if_transfer, strict=True)
            ],
            np.int64,
        ),
        "digest": np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], np.int64),
    }


def first_difference(ours: list[Record], theirs: list[Record]) -> str | None:
    """Query: one line about the first record in which two logs differ, or None."""
    for index, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own != other:
            return f"record {index}: {own} against {other}"
    if len(ours) != len(theirs):
        return f"one log has {len(ours)} records, the other {len(theirs)}"
    return None
