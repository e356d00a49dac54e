"""``hisparsim calibrate``: measure this machine with probes, fit the simulator's terms, write the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hisparsim.cost.calibrated import CalibratedModel
from hisparsim.cost.calibration_file import Calibration
from hisparsim.cost.terms import Term
from hisparsim.des.simulate import limits_of
from hisparsim.locality.profile import load_profile
from hisparsim.serving.policies import policy_class
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind

from .assemble import blueprint, make_executor
from .calibration_fit import LEAST_STEPS, PARTS, fit_parts
from .calibration_links import LinkSamples, measure_links
from .calibration_probe import NOT_IDLE, SEED, StepSamples, describe_coverage, probes_of, run_probes
from .devices import open_device
from .machine import describe_machine, versions
from .options import RunOptions

Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A calibration with what it was made from."""

    calibration: Calibration
    samples: StepSamples
    links: LinkSamples

    def table(self) -> list[dict[str, Any]]:
        """Query: one row a part and kind of step: steps, median time, spread, errors on steps left out."""
        rows: list[dict[str, Any]] = []
        mixed = np.array([load.prefill_tokens > 0 for load in self.samples.loads])
        for name, part in self.calibration.parts.items():
            measured = np.sum([self.samples.terms_ns[term] for term in PARTS[name].terms], axis=0)
            for phase, fit in part.fits.items():
                own = measured[mixed if phase.value == "mixed" else ~mixed]
                low, middle, high = np.percentile(own, (25, 50, 75)) / 1e6
                rows.append(
                    {
                        "part": name,
                        "steps": phase.value,
                        "num_steps": fit.num_points,
                        "median_ms": float(middle),
                        "p25_ms": float(low),
                        "p75_ms": float(high),
                        "left_out_median_error": fit.median_error,
                        "left_out_sum_error": fit.sum_error,
                    }
                )
        return rows


def calibrate(
    scenario: Scenario,
    options: RunOptions | None = None,
    *,
    scale: float = 1.0,
    seed: int = SEED,
    progress: Progress | None = None,
) -> CalibrationRun:
    """Change: run probes that cover the scenario on this machine and fit every part of a step.

    Args:
        scale: multiplies the requests of each probe.
        progress: called with one line a probe.

    Raises:
        RealRunError: the scenario cannot be run on this machine.
    """
    options = options or RunOptions()
    links = probe_links(scenario, options)
    samples = run_probes(scenario, probes_of(scenario, scale=scale, seed=seed), options, progress)
    return CalibrationRun(fitted(scenario, options, samples, links), samples, links)


def fitted(scenario: Scenario, options: RunOptions, samples: StepSamples, links: LinkSamples) -> Calibration:
    """Query: the calibration that measured steps and links give, with the machine's name and the date."""
    device = open_device(options.device, options.kernels, threads=options.threads)
    coverage = describe_coverage(samples)
    made = Calibration(
        device=options.device,
        machine=describe_machine(device),
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=scenario.model_spec.model_dump(mode="json", exclude={"name"}),
        row_format=scenario.row_format.value,
        num_ranks=1,
        uses_graphs=device.is_cuda,
        parts=fit_parts(samples),
        links=links.links,
        notes=(
            ", ".join(f"{name} {value}" for name, value in coverage.items()),
            f"page copies alone: {links.h2d_alone / 1e9:.2f} GB/s to the device, "
            f"{links.d2h_alone / 1e9:.2f} to the host; beside compute as under links (spread "
            f"{links.spread:.0%}); compute beside copies takes {links.compute_slowdown:+.0%}",
        ),
    )
    return replace(made, idle_start_ns=idle_start_ns(CalibratedModel(made, token_bytes=0), samples))


def idle_start_ns(model: CalibratedModel, samples: StepSamples) -> int:
    """Query: what steps after idling take longer than a model says, from the arrival on; 0 where few idled.

    A probe's other steps say how fast the machine was just then.
    """
    idled = samples.idled_ns != NOT_IDLE
    if int(idled.sum()) < LEAST_STEPS:
        return 0
    priced = np.sum(list(prediction_ns(model, samples).values()), axis=0).astype(np.float64)
    measured = samples.duration_ns.astype(np.float64)
    longer = []
    for run in np.unique(samples.run[idled]):
        own, busy = (samples.run == run) & idled, (samples.run == run) & ~idled
        pace = measured[busy].sum() / priced[busy].sum() if busy.any() else 1.0
        longer.extend(samples.idled_ns[own] + measured[own] - pace * priced[own])
    return max(round(float(np.mean(longer))), 0)


def prediction_ns(model: CalibratedModel, samples: StepSamples) -> dict[Term, np.ndarray[Any, Any]]:
    """Query: [n] nanoseconds of each term that a model gives the very loads that were measured."""
    predicted = {term: np.zeros(len(samples), np.int64) for term in Term}
    for place, load in enumerate(samples.loads):
        for term, ns in model.price(load).terms.items():
            predicted[Term(term)][place] = int(ns)
    return predicted


def probe_links(scenario: Scenario, options: RunOptions) -> LinkSamples:
    """Change: the rates between the tiers, by an executor with the scenario's pools that only copies."""
    scenario = scenario.with_overrides(["policy.name=hybrid"])
    limits = limits_of(scenario.setup(PoolKind.PACKED))
    policy = policy_class("hybrid")(limits)
    profile = load_profile(scenario.locality.profile, scenario.model_spec.index_top_k)
    plan = blueprint(
        scenario.model_spec, scenario.row_format, limits, policy, profile, options, scenario.seed
    )
    device = open_device(options.device, options.kernels, threads=options.threads)
    executor = make_executor(plan, device)
    try:
        return measure_links(executor, device)
    finally:
        executor.copies.close()
