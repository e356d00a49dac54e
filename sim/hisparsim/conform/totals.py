"""Totals of a lockstep run, under the names that a log gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hisparsim.serving.lockstep import LockstepStep
from hisparsim.serving.plan import Load, Restore, StepPlan, WriteBack
from hisparsim.serving.progress import Completion


class RunTotals:
    """Sums, maxima and last values over the rows of a run."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(
            ("calls", "steps", "output_tokens", "transfers", "indexer_loads", "pages_lost", "stall_steps",
             "victim_inflight_stalls", "prefill_tokens", "decode_tokens", "running"), 0
        )  # fmt: skip
        self._last: dict[str, int] = {}
        self._peaks = dict.fromkeys(("running", "host_used", "n_hot"), 0)
        self._min_free: int | None = None

    def add_step(self, step: LockstepStep, row: Mapping[str, int]) -> None:
        """Change: count one step."""
        sums = self._sums
        sums["calls"] += 1
        sums["steps"] += row["sched_reqs"] > 0
        sums["pages_lost"] += row["pages_lost"]
        sums["stall_steps"] += row["stall_break"]
        sums["victim_inflight_stalls"] += row["victim_inflight"]
        sums["prefill_tokens"] += row["sched_prefill_tokens"]
        sums["decode_tokens"] += row["sched_decode_tokens"]
        sums["running"] += row["running"]
        if isinstance(step.plan, StepPlan):
            for action in step.plan.actions:
                if isinstance(action, WriteBack):
                    sums["transfers"] += len(action.host_blocks)
                elif isinstance(action, Restore):
                    sums["transfers"] += 1
                elif isinstance(action, Load):
                    sums["indexer_loads"] += 1
        for column in self._peaks:
            self._peaks[column] = max(self._peaks[column], row[column])
        free = row["free_gpu_blocks"]
        self._min_free = free if self._min_free is None else min(self._min_free, free)
        self._last = dict(row)

    def add_completion(self, _plan: StepPlan, completion: Completion) -> None:
        """Change: count the tokens that a step produced."""
        listed = sum(tokens for _, tokens in completion.listed)
        self._sums["output_tokens"] += len(completion.steady) + listed

    def beside(self, logged: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Query: total -> (logged, own), for the totals that the log has and this run counts."""
        last, sums = self._last, self._sums
        own: dict[str, float] = {name: sums[name] for name in sums if name != "running"}
        if last:
            own |= {
                "finished": last["finished"],
                "preemptions": last["preemptions"],
                "pages_adopted": last["pages_adopted_cum"],
                "prefix_hit_tokens": last["prefix_hit_tokens"],
                "mean_running": sums["running"] / sums["calls"],
                "peak_running": self._peaks["running"],
                "peak_host_blocks": self._peaks["host_used"],
                "max_hot_requests": self._peaks["n_hot"],
                "min_free": self._min_free or 0,
            }
        return {name: (logged[name], own[name]) for name in logged if name in own}
