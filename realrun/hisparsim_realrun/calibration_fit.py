"""From measured steps to fits: robust least squares without negative coefficients, and errors left out.

Steps of a busy machine have pauses in them, so residuals are weighted by Huber's rule. What the weights leave
out is time all the same: the whole fit is scaled so that the sum over all steps is the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.calibration_file import FEATURES, Fit, PartFit, Phase
from hisparsim.cost.load import StepLoad
from hisparsim.cost.terms import Term

from .calibration_probe import NOT_IDLE, StepSamples

Floats = NDArray[np.float64]
HUBER = 1.5
"""Residuals beyond so many median deviations count linearly."""
NUM_FOLDS = 5
LEAST_STEPS = 12
"""Fewer steps of a kind are no measurement of it."""


@dataclass(frozen=True)
class PartShape:
    """What the time of one part is made of."""

    decode: Term
    prefill: Term
    terms: tuple[Term, ...]
    """Measured terms that it sums."""
    curve: bool
    """Grows with the step's tokens along a curve."""
    features: tuple[str, ...] = ()


_PREFILL = ("num_prefills", "prefill_tokens", "prefill_past_tokens")

PARTS: Mapping[str, PartShape] = MappingProxyType(
    {
        "projections": PartShape(
            Term.DECODE_PROJECTIONS,
            Term.PREFILL_PROJECTIONS,
            (Term.DECODE_PROJECTIONS, Term.PREFILL_PROJECTIONS),
            True,
        ),
        "decode_indexer": PartShape(
            Term.DECODE_INDEXER,
            Term.DECODE_INDEXER,
            (Term.DECODE_INDEXER,),
            False,
            ("num_decodes", "sum_context_tokens", "prefill_tokens"),
        ),
        "prefill_indexer": PartShape(
            Term.PREFILL_INDEXER, Term.PREFILL_INDEXER, (Term.PREFILL_INDEXER,), False, _PREFILL
        ),
        "sparse_attention": PartShape(
            Term.DECODE_SPARSE,
            Term.PREFILL_SPARSE,
            (Term.DECODE_SPARSE, Term.PREFILL_SPARSE),
            True,
            ("selected_rows", "prefill_selected_rows"),
        ),
        "moe": PartShape(Term.MOE, Term.MOE, (Term.MOE,), True),
        "shared_expert": PartShape(Term.SHARED_EXPERT, Term.SHARED_EXPERT, (Term.SHARED_EXPERT,), True),
        "dense_mlp": PartShape(Term.DENSE_MLP, Term.DENSE_MLP, (Term.DENSE_MLP,), True),
        "router": PartShape(Term.ROUTER, Term.ROUTER, (Term.ROUTER,), True),
        "all_reduce": PartShape(Term.ALL_REDUCE, Term.ALL_REDUCE, (Term.ALL_REDUCE,), True),
        "norms": PartShape(Term.NORMS, Term.NORMS, (Term.NORMS,), True, ("num_decodes", "num_prefills")),
        "sampling": PartShape(Term.SAMPLING, Term.SAMPLING, (Term.SAMPLING,), False, ("sampled_tokens",)),
        "resolve": PartShape(
            Term.RESOLVE,
            Term.RESOLVE,
            (Term.RESOLVE,),
            False,
            ("num_decodes", "hot_requests", "missed_rows"),
        ),
        "hot_gather": PartShape(
            Term.HOT_GATHER, Term.HOT_GATHER, (Term.HOT_GATHER,), False, ("has_misses", "missed_rows")
        ),
        "staging": PartShape(
            Term.STAGING, Term.STAGING, (Term.STAGING,), False, ("num_decodes", *_PREFILL, "staged_pages")
        ),
        "mirror": PartShape(
            Term.MIRROR, Term.MIRROR, (Term.MIRROR,), False, ("has_mirror", "mirrored_tokens")
        ),
        "loop": PartShape(
            Term.LAUNCH,
            Term.LAUNCH,
            (Term.LAUNCH, Term.ATTENTION_LATENCY, Term.DRAFTS),
            False,
            ("num_decodes", "num_prefills", "prefill_tokens", "resolves", "write_back_mib"),
        ),
    }
)
"""The parts of a step, in the order in which they are booked. Every term belongs to one of them."""


def fit_parts(samples: StepSamples) -> dict[str, PartFit]:
    """Query: the fit of every part in every kind of step that was measured often enough."""
    parts = {}
    for name, shape in PARTS.items():
        measured = np.sum([samples.terms_ns[term] for term in shape.terms], axis=0).astype(np.float64)
        fits = {}
        for phase in Phase:
            chosen = np.array([_phase(load) is phase for load in samples.loads])
            chosen &= samples.idled_ns == NOT_IDLE
            if int(chosen.sum()) >= LEAST_STEPS:
                loads = [load for load, wanted in zip(samples.loads, chosen, strict=True) if wanted]
                fits[phase] = fit_part(shape, loads, measured[chosen])
        parts[name] = PartFit(shape.decode, shape.prefill, fits)
    return parts


def fit_part(shape: PartShape, loads: Sequence[StepLoad], measured_ns: Floats) -> Fit:
    """Query: one part's fit to steps of one kind, with its errors on every fifth step left out in turn."""
    knots = _knots(loads) if shape.curve else ()
    design = _design(shape, knots, loads)
    order = np.random.default_rng([len(loads), 5]).permutation(len(loads))
    predicted = np.zeros(len(loads))
    for fold in range(NUM_FOLDS):
        out = order[fold::NUM_FOLDS]
        kept = np.setdiff1d(order, out)
        predicted[out] = design[out] @ _solve(design[kept], measured_ns[kept])
    weights = _solve(design, measured_ns)
    num_knots = len(knots)
    total, errors = float(measured_ns.sum()), np.abs(predicted - measured_ns) / np.maximum(measured_ns, 1.0)
    linear = dict(zip(shape.features, weights[1 + num_knots :].tolist(), strict=True))
    return Fit(
        constant_ns=float(weights[0]),
        tokens=tuple(knots),
        tokens_ns=tuple(weights[1 : 1 + num_knots].tolist()),
        linear_ns={name: ns for name, ns in linear.items() if ns},
        num_points=len(loads),
        median_error=float(np.median(errors)),
        sum_error=float(predicted.sum() / total - 1.0) if total else 0.0,
    )


def _phase(load: StepLoad) -> Phase:
    return Phase.MIXED if load.prefill_tokens else Phase.DECODE


def _knots(loads: Sequence[StepLoad]) -> tuple[int, ...]:
    """Query: tokens at which a curve bends: doublings within what was measured, both ends among them."""
    tokens = np.array([load.num_tokens for load in loads])
    least, most = int(tokens.min()), int(tokens.max())
    if most == least:
        return (least, least + 1)
    doublings = [1 << power for power in range(1, 24) if least < 1 << power < most]
    return (least, *doublings, most)


def _design(shape: PartShape, knots: Sequence[int], loads: Sequence[StepLoad]) -> Floats:
    """Query: [steps, 1 + knots + features]; a curve is a sum of hats, each 1 at its knot."""
    columns = [np.ones(len(loads)) if not knots else np.zeros(len(loads))]
    if knots:
        tokens = np.array([load.num_tokens for load in loads], np.float64)
        columns += [np.interp(tokens, knots, np.eye(len(knots))[place]) for place in range(len(knots))]
    columns += [np.array([float(FEATURES[name](load)) for load in loads]) for name in shape.features]
    return np.stack(columns, axis=1)


def _solve(design: Floats, measured: Floats) -> Floats:
    """Query: coefficients >= 0 by Huber-weighted least squares, scaled to the measured sum."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-12)
    scaled = design / scale
    spread = np.sqrt(np.maximum(measured, np.median(measured) * 0.1 + 1.0))
    weight = 1.0 / spread
    solution = np.zeros(design.shape[1])
    for _ in range(6):
        solution = _non_negative(scaled * weight[:, None], measured * weight)
        residual = np.abs(measured - scaled @ solution) / spread
        limit = HUBER * max(float(np.median(residual)) * 1.4826, 1e-9)
        weight = np.sqrt(np.minimum(1.0, limit / np.maximum(residual, 1e-12))) / spread
    predicted = float((scaled @ solution).sum())
    if predicted > 0.0:
        solution = solution * (float(measured.sum()) / predicted)
    return np.asarray(solution / scale)


def _non_negative(a: Floats, b: Floats) -> Floats:
    """Query: x >= 0 with the least |a x - b|, by the active set method of Lawson and Hanson (1974)."""
    gram, target = a.T @ a, a.T @ b
    size = len(target)
    gram = gram + np.eye(size) * (1e-10 * max(float(np.trace(gram)) / size, 1e-30))
    x = np.zeros(size)
    free = np.zeros(size, bool)
    tolerance = 1e-9 * max(float(np.abs(target).max()), 1e-30)
    for _ in range(3 * size):
        gradient = target - gram @ x
        candidates = np.where(free, -np.inf, gradient)
        best = int(np.argmax(candidates))
        if candidates[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if bool((trial[free] > 0.0).all()):
                x = trial
                break
            falling = free & (trial <= 0.0)
            step = float(np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-300
            x[~free] = 0.0
    return x
