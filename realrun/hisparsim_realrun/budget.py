"""The error budget: which part of a step is predicted wrongly, and what that costs the whole run.

Every step of the measured run is priced by the cost model with the load that it really had, so that the terms
stand beside what the runner's clock measured for the very same work. What the simulated run took by term
stands beside both: where it differs from the priced steps, other steps were taken, not other times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hisparsim.cost.calibrated import CalibratedModel
from hisparsim.cost.terms import Term
from hisparsim.results.records import RunResult

from .calibration import prediction_ns
from .calibration_fit import PARTS
from .calibration_probe import StepSamples

DECISIONS = ("num_decodes", "prefill_tokens", "running", "preemptions")
"""Step columns that tell what a step was; equal ones mean that both worlds decided alike."""


@dataclass(frozen=True)
class BudgetLine:
    """One part of the steps of a run."""

    part: str
    measured_s: float
    priced_s: float
    """The same steps, priced."""
    simulated_s: float
    """The steps of the simulation."""
    median_step_error: float | None
    """Median over the measured steps of priced / measured - 1; None where most take no time."""
    share_of_error: float
    """(priced - measured) over the measured time of all parts: what this part adds to the run's error."""


@dataclass(frozen=True)
class ErrorBudget:
    """All parts of one run, the worst first."""

    lines: tuple[BudgetLine, ...]
    measured_s: float
    priced_s: float
    simulated_s: float
    num_steps_measured: int
    num_steps_simulated: int
    num_equal_steps: int
    """Steps of a round before the first that the worlds decided differently, in decodes, prefill tokens,
    running requests or preemptions."""

    @property
    def worst(self) -> BudgetLine:
        """The part that adds most to the error."""
        return self.lines[0]

    def sentence(self) -> str:
        """Query: the budget in one line for people."""
        worst, whole_s = self.worst, self.measured_s
        return (
            f"of {whole_s:.2f} s measured: the same steps priced {self.priced_s / whole_s - 1:+.1%}, the "
            f"simulation's {self.simulated_s / whole_s - 1:+.1%}; most from {worst.part} "
            f"({worst.share_of_error:+.1%}); {self.num_equal_steps} of {self.num_steps_measured} steps came "
            "before the first decided differently"
        )

    def as_json(self) -> dict[str, Any]:
        """Query: the budget as plain data."""
        return asdict(self)


def error_budget(
    simulated: Sequence[RunResult],
    measured: Sequence[RunResult],
    rounds: Sequence[StepSamples],
    model: CalibratedModel,
) -> ErrorBudget:
    """Query: the budget of the steps that the measured rounds took (``rounds``) beside the simulated ones."""
    samples = StepSamples.joined(rounds)
    priced = prediction_ns(model, samples)
    total = max(float(samples.duration_ns.sum()), 1.0)
    lines = []
    for name, shape in PARTS.items():
        taken = _sum(samples.terms_ns, shape.terms)
        predicted = _sum(priced, shape.terms)
        columns = [run.steps.get(f"cost_{term.value}_ns") for run in simulated for term in shape.terms]
        played = sum(int(column.sum()) for column in columns if column is not None)
        worth = taken > 1_000
        error = np.median(predicted[worth] / taken[worth] - 1.0) if 2 * worth.sum() > len(worth) else None
        lines.append(
            BudgetLine(
                name,
                float(taken.sum()) / 1e9,
                float(predicted.sum()) / 1e9,
                played / 1e9,
                None if error is None else float(error),
                float(predicted.sum() - taken.sum()) / total,
            )
        )
    return ErrorBudget(
        tuple(sorted(lines, key=lambda line: -abs(line.share_of_error))),
        total / 1e9,
        sum(line.priced_s for line in lines),
        sum(line.simulated_s for line in lines),
        len(samples),
        sum(run.num_steps for run in simulated),
        sum(num_equal_steps(*pair) for pair in zip(simulated, measured, strict=True)),
    )


def num_equal_steps(first: RunResult, second: RunResult) -> int:
    """Query: how many steps from the start on decided the same in two runs."""
    count = min(first.num_steps, second.num_steps)
    differs = np.zeros(count, bool)
    for name in DECISIONS:
        if name in first.steps and name in second.steps:
            differs |= first.steps[name][:count] != second.steps[name][:count]
    return int(np.argmax(differs)) if differs.any() else count


def _sum(times: dict[Term, np.ndarray[Any, Any]], terms: Sequence[Term]) -> np.ndarray[Any, Any]:
    return np.asarray(np.sum([times[term] for term in terms], axis=0))
