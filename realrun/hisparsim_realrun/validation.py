"""``hisparsim validate``: the same workloads in the simulator and for real, and how far they are apart.

A *cell* is one metric of one policy on one workload. It passes when |error| <= max(bound, its 95 % interval);
the interval is the wider of the paired bootstrap over requests and the spread of reruns of one cell. So noise
can excuse a miss; that it cannot excuse everything is the last rule: at least 80 % of the judged cells must
have an interval below the bound, or the machine is too noisy to tell, and the validation fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hisparsim.cost.calibrated import CalibratedModel
from hisparsim.des.simulate import simulate
from hisparsim.results.metrics import compute_metrics
from hisparsim.results.records import RunResult
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace

from .bootstrap import (
    STATISTICS,
    duration_interval,
    latencies_of,
    latency_interval,
    rerun_noise,
)
from .budget import ErrorBudget, error_budget
from .calibration_probe import StepSamples, run_listening
from .calibration_source import CalibrationSource
from .options import RunOptions
from .rounds import joined
from .validation_workloads import LEAST_REQUESTS, Workload

BOUNDS: Mapping[str, float] = MappingProxyType(
    {
        "output_tokens_per_s": 0.05,
        "ttft_s.p50": 0.05,
        "ttft_s.p95": 0.15,
        "tpot_s.p95": 0.15,
        "e2e_s.p95": 0.15,
    }
)
"""The judged metrics and how far the simulation may be off (DESIGN: 5 % for throughput and median TTFT, 15 %
for 95th percentiles)."""
REPORTED_BOUND = 0.15
"""Of metrics that are reported and not judged."""
LEAST_QUIET_SHARE = 0.8
NUM_RERUNS = 3
_COUNTS = ("mean_running", "num_preemptions", "h2d_bytes", "d2h_bytes", "hot_hit_rate", "resident_share")
_RATES = ("output_tokens_per_s", "total_tokens_per_s", "request_per_s")
Progress = Callable[[str], None]


class Verdict(StrEnum):
    """How a validation ended."""

    PASSED = "passed"
    FAILED = "failed"
    """A judged cell is off by more than its bound and its noise."""
    TOO_NOISY = "too noisy to tell"
    """Fewer than 80 % of the judged cells have an interval below their bound."""


@dataclass(frozen=True)
class MetricCheck:
    """One cell."""

    name: str
    simulated: float
    measured: float
    rel_error: float | None
    """simulated / measured - 1; None where the measured value is 0 and the simulated is not."""
    noise_rel: float | None
    """Half of the 95 % interval of the error, relative; None where there is none (a count, one run)."""
    bound: float
    judged: bool

    @property
    def passed(self) -> bool:
        """|error| <= max(bound, interval)."""
        return self.rel_error is not None and abs(self.rel_error) <= max(self.bound, self.noise_rel or 0.0)

    @property
    def is_quiet(self) -> bool:
        """The interval is below the bound: a miss of the bound would have been seen."""
        return self.noise_rel is not None and self.noise_rel < self.bound

    def as_json(self) -> dict[str, Any]:
        """Query: the cell as plain data."""
        return {
            "name": self.name,
            "simulated": self.simulated,
            "measured": self.measured,
            "rel_error": self.rel_error,
            "noise_rel": self.noise_rel,
            "bound": self.bound,
            "judged": self.judged,
            "passed": self.passed,
        }


@dataclass(frozen=True, eq=False)
class PolicyCheck:
    """One policy on one workload in both worlds."""

    workload: str
    policy: str
    simulated: RunResult
    measured: RunResult
    metrics: tuple[MetricCheck, ...]
    budget: ErrorBudget

    def as_json(self) -> dict[str, Any]:
        """Query: one entry of ``workloads``."""
        return {
            "name": self.workload,
            "policy": self.policy,
            "num_requests": self.measured.num_requests,
            "metrics": [check.as_json() for check in self.metrics],
            "budget": self.budget.as_json(),
        }


@dataclass(eq=False)
class Validation:
    """All policies on all workloads, and what the reruns said of the noise."""

    device: str
    machine: Mapping[str, Any]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    checks: list[PolicyCheck] = field(default_factory=list)
    rerun_of: str | None = None
    """The workload and policy that were run again."""
    rerun_noise: Mapping[str, float] = field(default_factory=dict)
    """Metric -> half of the 95 % interval of one run, relative."""

    @property
    def judged(self) -> list[MetricCheck]:
        return [check for policy in self.checks for check in policy.metrics if check.judged]

    @property
    def quiet_share(self) -> float:
        """Share of the judged cells whose interval is below their bound."""
        return sum(check.is_quiet for check in self.judged) / max(len(self.judged), 1)

    @property
    def verdict(self) -> Verdict:
        if not all(check.passed for check in self.judged):
            return Verdict.FAILED
        return Verdict.PASSED if self.quiet_share >= LEAST_QUIET_SHARE else Verdict.TOO_NOISY

    def as_json(self) -> dict[str, Any]:
        """Query: the validation as ``hisparsim validate --json`` prints it."""
        return {
            "device": self.device,
            "machine": dict(self.machine),
            "calibration": dict(self.calibration),
            "verdict": self.verdict.value,
            "num_judged": len(self.judged),
            "num_passed": sum(check.passed for check in self.judged),
            "quiet_share": self.quiet_share,
            "reruns": {"of": self.rerun_of, "noise_rel": dict(self.rerun_noise)},
            "workloads": [check.as_json() for check in self.checks],
        }


def check_policy(
    workload: str,
    simulated: RunResult,
    measured: RunResult,
    budget: ErrorBudget,
    reruns: Mapping[str, float] | None = None,
) -> PolicyCheck:
    """Query: every metric of one policy on one workload, in both worlds.

    Args:
        reruns: noise of single runs by metric, where some cell was run several times.
    """
    reruns = reruns or {}
    values = [compute_metrics(result).flat() for result in (simulated, measured)]
    latencies = [latencies_of(result) for result in (simulated, measured)]
    checks = []
    for name in _metric_names(values[1]):
        ours, theirs = (_number(side.get(name)) for side in values)
        if ours is None or theirs is None:
            continue
        noise = _noise(name, latencies, simulated, measured, reruns)
        if ours == theirs:
            error: float | None = 0.0
        else:
            error = ours / theirs - 1.0 if theirs else None
        judged = name in BOUNDS and measured.num_requests >= LEAST_REQUESTS
        checks.append(MetricCheck(name, ours, theirs, error, noise, BOUNDS.get(name, REPORTED_BOUND), judged))
    return PolicyCheck(workload, measured.policy, simulated, measured, tuple(checks), budget)


@dataclass(eq=False)
class _Cell:
    """A workload under a policy, with what its rounds measured."""

    workload: Workload
    policy: str
    scenario: Scenario
    measured: list[RunResult] = field(default_factory=list)
    samples: list[StepSamples] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.workload.name}, {self.policy}"

    def play(self, trace: Trace, options: RunOptions) -> None:
        """Change: measure one round more."""
        run, samples = run_listening(self.scenario, trace, options)
        self.measured.append(run.result)
        self.samples.append(samples)


def validate(
    scenario: Scenario,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    validation: Validation,
    options: RunOptions,
    source: CalibrationSource,
    *,
    num_reruns: int = NUM_RERUNS,
    progress: Progress | None = None,
) -> Validation:
    """Change: play every workload under every policy in both worlds; fills and returns ``validation``.

    All is measured first, a round of every cell before the next round of any, with the calibration's probes
    spread in between, so that a machine which drifts drifts for every cell and in both worlds. Then the fits
    are made and the same rounds simulated. The first policy on the last workload is measured ``num_reruns``
    times in all, its reruns spread over every round.

    Args:
        source: where the calibration comes from.
    """
    say = progress or (lambda line: None)
    first = with_calibration(scenario, source.begin())
    traces = {}
    for workload in workloads:
        per_second = capacity_per_s(first, workload)
        traces[workload.name] = [workload.make(per_second, number) for number in range(workload.num_rounds)]
    cells = [_cell(scenario, workload, policy) for workload in workloads for policy in policies]
    again = cells[-len(policies)]
    reruns = [_cell(scenario, again.workload, again.policy) for _ in range(num_reruns - 1)]
    num_rounds = max(workload.num_rounds for workload in workloads)
    schedule = [
        (number, cell)
        for number in range(num_rounds)
        for cell in _spread(cells, reruns)
        if number < cell.workload.num_rounds
    ]
    for done, (number, cell) in enumerate(schedule, 1):
        rerun = ", again for the noise of whole runs" if cell in reruns else ""
        say(f"{cell.name}: round {number + 1} of {cell.workload.num_rounds}{rerun} ({done}/{len(schedule)})")
        cell.play(traces[cell.workload.name][number], options)
        source.between(done, len(schedule))
    if reruns:
        validation.rerun_of = again.name
        validation.rerun_noise = _noise_of([joined(cell.measured) for cell in (again, *reruns)])
    file = source.finish()
    model = CalibratedModel.of(with_calibration(scenario, file))
    for cell in cells:
        priced = with_calibration(cell.scenario, file)
        simulated = [simulate(priced, trace) for trace in traces[cell.workload.name]]
        budget = error_budget(simulated, cell.measured, cell.samples, model)
        say(f"{cell.name}: {budget.sentence()}")
        validation.checks.append(
            check_policy(
                cell.workload.name, joined(simulated), joined(cell.measured), budget, validation.rerun_noise
            )
        )
    return validation


def _cell(scenario: Scenario, workload: Workload, policy: str) -> _Cell:
    settings = [f"policy.name={policy}", *workload.settings]
    return _Cell(workload, policy, scenario.with_overrides(settings))


def _spread(cells: Sequence[_Cell], reruns: Sequence[_Cell]) -> list[_Cell]:
    """Query: all cells in order with the reruns evenly between them."""
    order = list(cells)
    for number, rerun in reversed(list(enumerate(reruns))):
        order.insert(round(len(cells) * (number + 0.5) / len(reruns)), rerun)
    return order


def capacity_per_s(scenario: Scenario, workload: Workload) -> float:
    """Query: requests a second of the workload's lengths that the simulation serves in a closed loop.

    1.0 for workloads whose arrivals do not depend on it.
    """
    if not workload.follows_capacity:
        return 1.0
    trace = workload.make(1e6, 0)
    closed = scenario.with_overrides(
        ["policy.name=gpu-only", f"workload.concurrency={scenario.scheduler.max_num_seqs}"]
    )
    return compute_metrics(simulate(closed, trace)).request_per_s


def with_calibration(scenario: Scenario, file: Path) -> Scenario:
    """Query: the scenario priced by a calibration file."""
    return scenario.with_overrides([f"cost.source=calibration:{file}"])


def _noise_of(runs: Sequence[RunResult]) -> dict[str, float]:
    flats = [compute_metrics(run).flat() for run in runs]
    noise = {}
    for name in _metric_names(flats[0]):
        values = [_number(flat.get(name)) for flat in flats]
        known = [value for value in values if value is not None]
        if len(known) == len(flats):
            noise[name] = rerun_noise(known)
    return noise


def _noise(
    name: str,
    latencies: Sequence[Mapping[str, Any]],
    simulated: RunResult,
    measured: RunResult,
    reruns: Mapping[str, float],
) -> float | None:
    """Query: the wider of the bootstrap's interval and the reruns', None where neither exists."""
    latency, _, statistic = name.partition(".")
    intervals = [reruns[name]] if name in reruns else []
    if latency in latencies[0] and statistic in STATISTICS:
        ours, theirs = (side[latency] for side in latencies)
        intervals.append(latency_interval(ours, theirs, STATISTICS[statistic], seed=1))
    elif name in _RATES:
        intervals.append(duration_interval(simulated, measured, seed=1))
    known = [interval for interval in intervals if not math.isnan(interval)]
    return max(known) if known else None


def _metric_names(flat: Mapping[str, Any]) -> Iterable[str]:
    for latency in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic in STATISTICS:
            yield f"{latency}.{statistic}"
    for name in (*_RATES, *_COUNTS):
        if name in flat:
            yield name


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
