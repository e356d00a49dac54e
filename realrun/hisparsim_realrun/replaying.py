"""``replay-log``: a real run's directory, and its core driven again by the inputs that it recorded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hisparsim.results.directory import read_description, write_run
from hisparsim.serving.core import ServingCore
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.policies import policy_class
from hisparsim.serving.progress import ProtocolError

from .decisions import decision_columns
from .engine import RealRun
from .errors import RealRunError
from .inputs import read_inputs, redrive, write_inputs

INPUTS_FILE = "inputs.parquet"
DECISIONS_FILE = "decisions.parquet"
ANSWERS_FILE = "answers.parquet"


@dataclass(frozen=True)
class ReplayVerdict:
    """Whether the core decided the same again."""

    num_decisions: int
    num_plans: int
    difference: str | None
    """One line about the first decision that differs."""


def write_real_run(run: RealRun, directory: Path) -> None:
    """Change: a run directory; beside the usual files ``inputs``, ``decisions`` and ``answers.parquet``.

    Raises:
        RunDirectoryError: the directory exists already.
    """
    write_run(run.result, directory, decisions=decision_columns(run.decisions))
    write_inputs(directory / INPUTS_FILE, run.inputs)
    rows = [
        (request_id, index, token)
        for request_id, tokens in sorted(run.answers.items())
        for index, token in enumerate(tokens)
    ]
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    table = {
        name: pa.array(column, pa.int64())
        for name, column in zip(("request_id", "index", "token"), columns, strict=True)
    }
    pq.write_table(pa.table(table), directory / ANSWERS_FILE, compression="zstd")


def replay_log(directory: Path) -> ReplayVerdict:
    """Query: drive a fresh core with a real run's inputs and compare the decision logs.

    Raises:
        RealRunError: not the directory of a real run.
    """
    described = read_description(directory)
    summary = described["summary"]
    if "limits" not in summary or not (directory / DECISIONS_FILE).is_file():
        raise RealRunError(f"{directory}: not the directory of a real run (it has no recorded inputs)")
    known = {field.name for field in fields(ServingLimits)}
    limits = ServingLimits(**{name: value for name, value in summary["limits"].items() if name in known})
    policy = policy_class(described["policy"])(limits, **summary["policy_options"])
    inputs = read_inputs(directory / INPUTS_FILE)
    try:
        logged = pq.read_table(directory / DECISIONS_FILE, columns=["plan", "kind", "digest"]).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise RealRunError(f"{directory / DECISIONS_FILE}: damaged or cut short ({error})") from None
    try:
        columns = decision_columns(redrive(ServingCore(limits, policy), inputs))
    except (ProtocolError, ValueError) as error:
        return ReplayVerdict(
            len(logged["plan"]), len(set(logged["plan"])), f"the core refused a call: {error}"
        )
    again = {name: column.tolist() for name, column in columns.items()}
    difference = None
    for row, (plan, kind, digest) in enumerate(
        zip(logged["plan"], logged["kind"], logged["digest"], strict=True)
    ):
        if row >= len(again["plan"]):
            difference = f"decision {row} ({kind} in plan {plan}) was not made again"
        elif again["digest"][row] != digest:
            difference = (
                f"decision {row}: {kind} in plan {plan}, now {again['kind'][row]} in {again['plan'][row]}"
            )
        if difference is not None:
            break
    if difference is None and len(again["plan"]) != len(logged["plan"]):
        difference = f"{len(again['plan'])} decisions were made, {len(logged['plan'])} are logged"
    return ReplayVerdict(len(logged["plan"]), int(np.unique(logged["plan"]).size), difference)
