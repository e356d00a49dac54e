"""The engine: a trace served in real time, step by step, measured by the wall clock.

The order of things is the simulator's (:mod:`hisparsim.des.gang`): arrivals are queued, a plan that is due
starts, with two plans in flight the next one is made as soon as it has started, then its tokens come back and
its worker reports. What arrives during a step is first seen by the step after next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hisparsim.des.arrivals import Arrivals
from hisparsim.des.draws import tokens_of_verify_step
from hisparsim.des.identity import PageIdentity
from hisparsim.des.simulate import limits_of
from hisparsim.des.summary import bound_by, trace_summary
from hisparsim.locality.profile import load_profile
from hisparsim.results.records import RequestStatus, RunResult
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import Idle, StepPlan
from hisparsim.serving.policies import policy_class
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.serving.request import Request, RequestSpec
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind, ServingSetup
from hisparsim_traces import Trace

from .assemble import blueprint
from .decisions import Record
from .desk import TransferDesk
from .errors import death_of
from .inputs import Input, RecordedCore
from .options import RunOptions
from .ranks import Crew, Solo
from .record import PlanState, RunRecord
from .work import bind, outcome_of

MAX_WAIT_S = 0.0005
"""Longest sleep while a transfer is under way."""
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class RealRun:
    """A finished run: the record, what the core was told and decided, and what requests answered."""

    result: RunResult
    inputs: list[Input]
    decisions: list[Record]
    answers: dict[int, list[int]]
    """Request -> sampled tokens."""


def run_real(
    scenario: Scenario,
    trace: Trace,
    options: RunOptions | None = None,
    *,
    crew: Crew | None = None,
    progress: Progress | None = None,
) -> RealRun:
    """Change: play a trace under the scenario's policy on real memory.

    Args:
        scenario: as for ``hisparsim.simulate``; ``parallel``, ``node`` and ``cost`` do not matter here.
        options: device, selections, exactness. Slices: :func:`hisparsim_realrun.geometry.sliced_scenario`.
        crew: the ranks that perform steps; this process alone without it.
        progress: called with the number of finished requests as it grows.

    Raises:
        RealRunError: the scenario cannot be run on this machine.
        RunDied: the run ended early; ``run`` of the error holds what was measured.
        Wedged: requests wait for memory that nothing will free.
    """
    crew = crew or Solo(options or RunOptions())
    try:
        engine = _engine(scenario, trace, options or RunOptions(), crew, progress)
        return _serve(engine)
    finally:
        crew.close()


def _engine(
    scenario: Scenario, trace: Trace, options: RunOptions, crew: Crew, progress: Progress | None
) -> Engine:
    """Change: the loop, ready to serve, with pools and weights allocated on every rank."""
    workload = scenario.workload
    if workload.limit is not None:
        trace = trace.head(workload.limit)
    if workload.time_scale != 1.0:
        trace = trace.scaled(workload.time_scale)
    kind = policy_class(scenario.policy.name)
    model = scenario.model_spec
    setup = scenario.setup(PoolKind.PACKED if kind.uses_groups else PoolKind.WHOLE)
    limits = limits_of(setup)
    policy = kind(limits, **scenario.policy.options)
    profile = load_profile(scenario.locality.profile, model.index_top_k)
    plan = blueprint(model, scenario.row_format, limits, policy, profile, options, scenario.seed)
    try:
        crew.build(plan)
    except Exception as error:
        raise death_of(error) or error from error
    return Engine(scenario, setup, trace, ServingCore(limits, policy), crew, policy, progress)


def _serve(engine: Engine) -> RealRun:
    try:
        return engine.serve()
    except Exception as error:
        death = death_of(error)
        if death is None:
            raise
        death.run = engine.finish()
        raise death from error


@dataclass
class Engine:
    """One run's loop."""

    scenario: Scenario
    setup: ServingSetup
    trace: Trace
    core: ServingCore
    crew: Crew
    policy: ResidencyPolicy
    progress: Progress | None
    answers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrivals = Arrivals.of(self.trace, self.scenario)
        self.identity = PageIdentity(self.trace, self.setup.page_tokens)
        self.recorded = RecordedCore(self.core)
        self.desk = TransferDesk(self.recorded, self.crew.copies)
        self.record = RunRecord(self.trace.num_requests, self.setup.num_layers)
        self._next: tuple[StepPlan, PlanState] | None = None
        self._num_finished = 0
        self._start_ns = 0

    def serve(self) -> RealRun:
        """Change: from the first arrival to the last token."""
        self._start_ns = time.perf_counter_ns()
        while True:
            self._take_arrivals()
            if self._prepare():
                self._step()
            elif not self.desk.report_idle():
                if not self._anything_to_come():
                    return self.finish()
                self._wait()

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def _take_arrivals(self) -> None:
        due_ns = self.arrivals.next_ns()
        while due_ns is not None and due_ns <= self._now_ns():
            now = self._now_ns()
            for row in self.arrivals.due(now):
                self._submit(row, now)
            due_ns = self.arrivals.next_ns()

    def _submit(self, row: int, now_ns: int) -> None:
        spec = RequestSpec(
            row,
            self.arrivals.prompt_tokens[row],
            int(self.trace.output_tokens[row]),
            self.identity.keys(row),
        )
        reason = self.core.refusal(spec)
        if reason is not None:
            self.arrivals.refuse(row, reason, now_ns)
            return
        self.crew.register(spec)
        self.recorded.submit(spec)

    def _prepare(self) -> bool:
        if self._next is None:
            plan = self.recorded.plan()
            if isinstance(plan, Idle):
                return False
            self._next = (plan, PlanState(self.core))
        return True

    def _step(self) -> None:
        assert self._next is not None
        plan, state = self._next
        self._next = None
        started = time.perf_counter_ns()
        work = bind(self.core, plan, self._accepted)
        self.desk.start(plan)
        self.crew.start(work)
        if self.core.limits.async_depth > 1:
            self._prepare()
        output = self.crew.wait()
        ended_ns = self._now_ns()
        completion = self.recorded.complete(plan.plan_id, outcome_of(self.core, work))
        self.record.tokens(completion, ended_ns)
        self.record.step(plan, state, output, started - self._start_ns, ended_ns)
        for request, kept in completion.tokens:
            self.answers.setdefault(request.request_id, []).extend(output.sampled[request.request_id][:kept])
        self.desk.end(plan, started)
        for request in completion.finished:
            self.arrivals.finished(request.request_id, ended_ns, RequestStatus.FINISHED)
        if completion.finished and self.progress is not None:
            self._num_finished += len(completion.finished)
            self.progress(self._num_finished)

    def _accepted(self, request: Request, drafts: int) -> int:
        seed, acceptance = self.scenario.seed, self.scenario.speculation.acceptance
        request_id, done = request.request_id, request.output_tokens
        return tokens_of_verify_step(seed, request_id, done, drafts, acceptance) - 1

    def _anything_to_come(self) -> bool:
        if self.arrivals.next_ns() is not None or self.desk.outstanding:
            return True
        if self.core.num_alive:
            raise self.core.wedged()
        return False

    def _wait(self) -> None:
        """Poll until the next arrival, as vLLM and SGLang do unless told to sleep when idle.

        So no step waits for a core to wake up. Copies get the core while one is under way.
        """
        next_ns = self.arrivals.next_ns()
        if self.desk.outstanding:
            wait_s = MAX_WAIT_S if next_ns is None else max(next_ns - self._now_ns(), 0) / 1e9
            time.sleep(min(wait_s, MAX_WAIT_S))
            return
        while next_ns is not None and self._now_ns() < next_ns:
            time.sleep(0)

    # -- the result -------------------------------------------------------------------------------

    def finish(self) -> RealRun:
        """Query: the run as far as it has come."""
        result = RunResult(
            policy=self.scenario.policy.name,
            scenario=self.scenario.model_dump(mode="json"),
            trace=trace_summary(self.trace),
            wall_s=self._now_ns() / 1e9,
            summary=self._summary(),
            requests=self.record.request_columns(self.arrivals),
            steps=self.record.step_columns(),
            itl=self.record.gaps(),
        )
        return RealRun(result, self.recorded.inputs, self.recorded.decisions, self.answers)

    def _summary(self) -> dict[str, Any]:
        steps, record, counts = self.record.step_columns(), self.record, self.arrivals.counts
        busy_ns = max(int(steps["duration_ns"].sum()), 1)
        blocked = {reason: ns / busy_ns for reason, ns in sorted(record.blocked_ns.items())}
        rows = self.crew.row_counts
        moved = {name: int(steps[name].sum()) if name in steps else 0 for name in ("h2d_bytes", "d2h_bytes")}
        notes = [f"measured on {self.crew.describe()}"]
        if counts.first_rejection is not None:
            notes.append(f"{counts.rejected} requests were rejected; the first: {counts.first_rejection}")
        return {
            "measured": True,
            "device": self.crew.describe(),
            "blocked_share": blocked,
            "bound_by": bound_by(blocked, steps, busy_ns) if record.steps else None,
            "num_gpu_blocks": self.setup.num_gpu_blocks,
            "gpu_block_bytes": self.setup.gpu_block_bytes,
            "num_host_blocks": self.setup.num_host_blocks if self.policy.uses_groups else 0,
            "host_block_bytes": self.setup.host_block_bytes,
            "num_preemptions": self.core.num_preemptions,
            "num_stall_steps": record.num_stall_steps,
            "prefix_hit_tokens": self.core.prefix_hit_tokens,
            "h2d_bytes": moved["h2d_bytes"] + self.desk.h2d_bytes,
            "d2h_bytes": moved["d2h_bytes"] + self.desk.d2h_bytes,
            "missed_rows": rows.missed,
            "hot_hit_rows": rows.hit,
            "resident_rows": rows.resident,
            "tokens_truncated": counts.tokens_truncated,
            "tokens_discarded": self.core.discarded_tokens,
            "num_steps": len(steps["start_ns"]),
            "num_gpus": self.crew.num_ranks,
            "limits": asdict(self.core.limits),
            "policy_options": dict(self.policy.option_values),
            "notes": notes,
        }
