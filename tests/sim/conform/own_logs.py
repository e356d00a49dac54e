"""Writes decision logs of our own making in the format that ``hisparsim conform`` reads."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

from hisparsim.conform.compare import _acceptance
from hisparsim.conform.rows import log_row
from hisparsim.conform.workload import LoggedWorkload
from hisparsim.serving.core import ServingCore
from hisparsim.serving.lockstep import lockstep
from hisparsim.serving.policies import policy_class

GROUPS = 4


def workload(**changes: Any) -> dict[str, Any]:
    """A small plain workload of the hybrid policy: 6 users, 10 requests of 700 + 40 tokens."""
    return {
        "hisparse": True, "async": True, "row": 656, "hot": 256, "concurrency": 6, "num_requests": 10,
        "isl": 700, "osl": 40, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096,
        "enq_lag": 1, "done_lag": 2, **changes,
    }  # fmt: skip


def config(hybrid: bool, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"num_gpu_blocks": 260 if hybrid else 60, "gpu_block_bytes": 1000}
    if hybrid:
        base |= {"host_blocks": 300, "resident_groups": GROUPS, "hot_blocks_per_request": 4 * GROUPS}
    return {**base, **changes}


def write_log(
    folder: Path, name: str, work: dict[str, Any], sizes: dict[str, Any], max_steps: int | None = None
) -> list[dict[str, int]]:
    """Run the workload and write NAME.json and NAME.csv.gz; returns the rows."""
    prompts = [[f"r{n}", work["mix"][n % len(work["mix"])][0], None, 0, None, 0] for n in range(50)] if (
        work.get("mix")
    ) else []  # fmt: skip
    log = LoggedWorkload(name, work, sizes, {}, prompts, [], ("step", "finished"), [])
    core = ServingCore(log.limits, policy_class(log.policy)(log.limits, **log.policy_options))
    admitted: dict[int, int] = {}
    rows = []
    for step in lockstep(core, log.users(), log.lags, accepted=_acceptance(log), max_steps=max_steps):
        rows.append(log_row(core, step))
        for request in core.running:
            admitted.setdefault(request.request_id, step.index)
    requests = prompts or [
        [f"r{number}", work.get("isl", 0), at, 0, None, 0] for number, at in admitted.items()
    ]
    totals = {
        "calls": len(rows),
        "preemptions": rows[-1]["preemptions"],
        "finished": rows[-1]["finished"],
        "prefill_tokens": sum(row["sched_prefill_tokens"] for row in rows),
        "mean_running": sum(row["running"] for row in rows) / len(rows),
    }
    document = {
        "workload": work,
        "config": sizes,
        "totals": totals,
        "preempt_events": [],
        "requests": requests,
    }
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    write_rows(folder / f"{name}.csv.gz", rows)
    return rows


def write_rows(path: Path, rows: list[dict[str, int]]) -> None:
    with gzip.open(path, "wt", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
