"""A workload played in rounds: several short runs, joined end to end into one record.

A machine that is fast for some minutes and slow for others would give a whole cell to one of its moods. So
every cell is played a part at a time, all cells in turn, and what the rounds measured is judged together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results.records import RunResult

COUNTERS = (
    "num_preemptions",
    "num_stall_steps",
    "prefix_hit_tokens",
    "h2d_bytes",
    "d2h_bytes",
    "missed_rows",
    "hot_hit_rows",
    "resident_rows",
    "tokens_truncated",
    "tokens_stopped",
    "tokens_cancelled",
    "tokens_discarded",
    "num_steps",
    "num_events",
)
"""What a summary counts over the whole run: rounds add up."""
SIZES = ("num_gpu_blocks", "gpu_block_bytes", "num_host_blocks", "host_block_bytes", "num_gpus")
"""What every round has alike."""
_TIMES = ("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns")
_NEVER = -1


def joined(rounds: Sequence[RunResult]) -> RunResult:
    """Query: the rounds one after another as one run: each starts when the one before has ended.

    Requests and conversations are numbered on; counters add up; what holds of one round only (its offered
    load, its binding resource) is left out.
    """
    first = rounds[0]
    if len(rounds) == 1:
        return first
    starts_ns = np.cumsum([0, *(_end_ns(part) for part in rounds[:-1])])
    requests = [_shifted_requests(part, int(start)) for part, start in zip(rounds, starts_ns, strict=True)]
    for name in ("request_id", "session"):
        _number_on([columns[name] for columns in requests])
    steps = [
        {**part.steps, "start_ns": part.steps["start_ns"] + start}
        for part, start in zip(rounds, starts_ns, strict=True)
    ]
    before = 0
    for columns in steps:
        if "preemptions" in columns:
            columns["preemptions"] = columns["preemptions"] + before
            before = int(columns["preemptions"].max(initial=before))
    return RunResult(
        policy=first.policy,
        scenario=first.scenario,
        trace=_trace(rounds),
        wall_s=sum(part.wall_s for part in rounds),
        summary=_summary(rounds),
        requests={name: np.concatenate([columns[name] for columns in requests]) for name in requests[0]},
        steps={
            name: np.concatenate([columns[name] for columns in steps])
            for name in steps[0]
            if all(name in columns for columns in steps)
        },
        itl=(
            np.concatenate([part.itl[0] for part in rounds]),
            np.concatenate([part.itl[1] for part in rounds]),
        ),
    )


def _end_ns(part: RunResult) -> int:
    steps, requests = part.steps, part.requests
    ends = (steps["start_ns"] + steps["duration_ns"]).max(initial=0)
    return int(max([ends, *(requests[name].max(initial=0) for name in _TIMES)]))


def _shifted_requests(part: RunResult, start_ns: int) -> dict[str, NDArray[Any]]:
    columns = {name: column.copy() for name, column in part.requests.items()}
    for name in _TIMES:
        columns[name][columns[name] != _NEVER] += start_ns
    return columns


def _number_on(columns: Sequence[NDArray[np.int64]]) -> None:
    """Change: numbers of later rounds follow those of earlier ones; -1 stays."""
    following = 0
    for column in columns:
        column[column >= 0] += following
        following = max(following, int(column.max(initial=_NEVER)) + 1)


def _summary(rounds: Sequence[RunResult]) -> dict[str, Any]:
    summaries = [part.summary for part in rounds]
    known = summaries[0]
    added = {name: sum(s[name] for s in summaries) for name in COUNTERS if all(name in s for s in summaries)}
    notes = list(dict.fromkeys(note for s in summaries for note in s.get("notes", ())))
    return added | {name: known[name] for name in SIZES if name in known} | {"notes": notes}


def _trace(rounds: Sequence[RunResult]) -> dict[str, Any]:
    traces = [part.trace for part in rounds]
    sums = ("num_requests", "sum_input_tokens", "sum_output_tokens", "num_stamped")
    added = {name: sum(t[name] for t in traces) for name in sums if all(name in t for t in traces)}
    return {**traces[0], **added, "num_rounds": len(rounds)}
