"""What a real run measured, by the wall clock: one row a request, one row a step, gaps between tokens.

The same columns as a simulation's, so that both stand side by side. Times are integer nanoseconds from the
start of the run; ``cost_<term>_ns`` is the time that the step spent on a term, on rank 0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.terms import Term
from hisparsim.des.arrivals import Arrivals
from hisparsim.results.records import RequestStatus
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import Admit, StepPlan
from hisparsim.serving.policy import Census
from hisparsim.serving.progress import Completion

from .executor import StepOutput

_STATE = (
    ("num_full", "num_full"),
    ("num_mixed", "num_mixed"),
    ("num_none", "num_none"),
    ("free_blocks", "free"),
    ("index_blocks", "index"),
    ("resident_pinned_blocks", "resident_pinned"),
    ("resident_released_blocks", "resident_released"),
    ("hot_blocks", "hot"),
    ("other_blocks", "orphans"),
    ("host_blocks_used", "host_used"),
)


class PlanState:
    """Counts right after a plan was made, for its step's row."""

    def __init__(self, core: ServingCore) -> None:
        census: Census = core.policy.census(core.running)
        counts = asdict(census)
        self.columns = {
            "running": len(core.running),
            "waiting": len(core.waiting),
            **{column: int(counts[name]) for column, name in _STATE},
            "preemptions": core.num_preemptions,
        }
        self.blocked_by = core.notes.blocked_by
        self.waited = core.notes.waited


class RunRecord:
    """Rows as they come."""

    def __init__(self, num_requests: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self.steps: list[dict[str, int]] = []
        self.admitted_ns = np.full(num_requests, -1, np.int64)
        self.first_token_ns = np.full(num_requests, -1, np.int64)
        self.finish_ns = np.full(num_requests, -1, np.int64)
        self.output_tokens = np.zeros(num_requests, np.int64)
        self.hit_tokens = np.zeros(num_requests, np.int64)
        self.num_preemptions = np.zeros(num_requests, np.int64)
        self.blocked_ns: dict[str, int] = {}
        self.num_stall_steps = 0
        self._last_ns: dict[int, int] = {}
        self._gaps: dict[int, int] = {}

    def step(
        self, plan: StepPlan, state: PlanState, output: StepOutput, started_ns: int, ended_ns: int
    ) -> None:
        """Change: a step ran."""
        for action in plan.actions:
            if isinstance(action, Admit) and self.admitted_ns[action.request_id] < 0:
                self.admitted_ns[action.request_id] = started_ns
        duration = ended_ns - started_ns
        terms = dict.fromkeys(Term, 0) | output.terms_ns
        terms[Term.LAUNCH] += max(duration - sum(terms.values()), 0)
        decodes = plan.decodes.num_requests
        self.steps.append(
            {
                "start_ns": started_ns,
                "duration_ns": duration,
                "num_decodes": decodes,
                "decode_tokens": decodes * plan.decodes.query_tokens,
                "prefill_tokens": sum(chunk.num_tokens for chunk in plan.prefills),
                **state.columns,
                "h2d_bytes": output.h2d_bytes,
                "d2h_bytes": output.d2h_bytes,
                "missed_millirows": output.missed_rows * 1000 // self.num_layers,
                **{f"cost_{term.value}_ns": ns for term, ns in terms.items()},
            }
        )
        if state.columns["waiting"] and state.blocked_by:
            self.blocked_ns[state.blocked_by] = self.blocked_ns.get(state.blocked_by, 0) + duration
        self.num_stall_steps += state.waited

    def tokens(self, completion: Completion, now_ns: int) -> None:
        """Change: tokens came back; a verify step's are one chunk."""
        for request, kept in completion.tokens:
            row = request.request_id
            before = self._last_ns.get(row)
            if before is None:
                self.first_token_ns[row] = now_ns
            else:
                self._gaps[now_ns - before] = self._gaps.get(now_ns - before, 0) + 1
            self._last_ns[row] = now_ns
            self.output_tokens[row] += kept
        for request in completion.finished:
            row = request.request_id
            self.finish_ns[row] = now_ns
            self.num_preemptions[row] = request.num_preemptions
            self.hit_tokens[row] = request.hit_tokens or 0
            del self._last_ns[row]

    # -- tables -----------------------------------------------------------------------------------

    def request_columns(self, arrivals: Arrivals) -> dict[str, NDArray[Any]]:
        """Query: the requests' table."""
        trace = arrivals.trace
        return {
            "request_id": np.arange(trace.num_requests, dtype=np.int64),
            "session": trace.session.astype(np.int64),
            "turn": trace.turn.astype(np.int64),
            "arrival_ns": np.array(arrivals.arrival_ns, np.int64),
            "admitted_ns": self.admitted_ns,
            "first_token_ns": self.first_token_ns,
            "finish_ns": self.finish_ns,
            "prompt_tokens": np.array(arrivals.prompt_tokens, np.int64),
            "output_tokens": self.output_tokens,
            "declared_output_tokens": trace.output_tokens.astype(np.int64),
            "hit_tokens": self.hit_tokens,
            "num_preemptions": self.num_preemptions,
            "status": np.array([int(status) for status in arrivals.status], np.int8),
        }

    def step_columns(self) -> dict[str, NDArray[np.int64]]:
        """Query: the steps' table."""
        names = self.steps[0] if self.steps else ("start_ns", "duration_ns")
        return {name: np.array([row[name] for row in self.steps], np.int64) for name in names}

    def gaps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Query: gaps between chunks of tokens and how often each occurred."""
        gaps = np.array(sorted(self._gaps), np.int64)
        return gaps, np.array([self._gaps[int(gap)] for gap in gaps], np.int64)

    def num_finished(self, arrivals: Arrivals) -> int:
        """Query: requests that produced all their tokens."""
        return sum(status is RequestStatus.FINISHED for status in arrivals.status)
