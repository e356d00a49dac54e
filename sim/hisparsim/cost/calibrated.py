"""The cost source `calibration`: a step priced with what was measured on this very machine.

Every part of a step has a fit (:mod:`hisparsim.cost.calibration_file`); transfers inside a step are parts
like the others: what was measured is what they added to it. The links carry what outlives a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hisparsim.cost.calibration_file import (
    FEATURES,
    Calibration,
    CalibrationError,
    Fit,
    PartFit,
    Phase,
    calibration_of,
)
from hisparsim.cost.curve import Counts, Curve, whole_ns
from hisparsim.cost.load import MOVING, StepLoad
from hisparsim.cost.model import QUIET, Background, StepCost
from hisparsim.cost.terms import Term
from hisparsim.specs.kv_layout import PAGE_TOKENS, kv_layout
from hisparsim.specs.scenario import Scenario

_MOVING = frozenset({*MOVING, "has_misses", "missed_rows", "has_mirror", "write_back_mib"})


@dataclass(frozen=True)
class _Priced:
    """One fit, ready to be evaluated: `moving` features may differ from step to step of a stretch."""

    constant_ns: float
    curve: Curve | None
    fixed: tuple[tuple[str, float], ...]
    moving: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, fit: Fit) -> _Priced:
        used = [(name, ns) for name, ns in fit.linear_ns.items() if ns]
        return cls(
            fit.constant_ns,
            fit.curve(),
            tuple(entry for entry in used if entry[0] not in _MOVING),
            tuple(entry for entry in used if entry[0] in _MOVING),
        )

    def ns(self, load: StepLoad, tokens: int) -> Any:
        """Query: nanoseconds, a float or one a step; the same additions in the same order for both."""
        total: Any = self.constant_ns
        if self.curve is not None:
            total = total + self.curve(tokens)
        for name, ns in self.fixed:
            total = total + ns * FEATURES[name](load)
        for name, ns in self.moving:
            total = total + ns * FEATURES[name](load)
        return total


class CalibratedModel:
    """Prices steps of the model and device that were calibrated. Pure: holds tables only."""

    def __init__(self, calibration: Calibration, *, token_bytes: int) -> None:
        self.calibration = calibration
        self._token_bytes = token_bytes
        self._parts = {
            name: (part, {phase: _Priced.of(fit) for phase, fit in part.fits.items()})
            for name, part in calibration.parts.items()
        }

    @classmethod
    def of(cls, scenario: Scenario) -> CalibratedModel:
        """Query: the model that a scenario's calibration file gives.

        Raises:
            CalibrationError: the file cannot be read, or was made for another model, row format or size.
        """
        calibration = calibration_of(scenario)
        parallel, speculates = scenario.parallel, scenario.speculation.draft_tokens > 0
        ranks = parallel.tp * parallel.dp
        calibration.check_model(scenario.model_spec, scenario.row_format.value, ranks)
        if parallel.dp > 1:
            raise CalibrationError(
                f"parallel.dp = {parallel.dp}: a calibration covers one replica; set it to 1"
            )
        layout = kv_layout(scenario.model_spec, scenario.row_format, with_mtp=speculates)
        return cls(calibration, token_bytes=layout.num_layers * layout.row_bytes)

    def price(self, load: StepLoad, background: Background = QUIET) -> StepCost:
        """Query: the cost of a load. k steps in one call equal k calls, bit for bit.

        Other flows on the links (`background`) do not change it: the fits hold what copies cost beside them.
        """
        phase = Phase.MIXED if load.prefill_tokens else Phase.DECODE
        batch = load.num_decodes
        if self.calibration.uses_graphs and phase is Phase.DECODE:
            batch = max(load.graph_requests, batch)
        decode_tokens = batch * load.query_tokens
        tokens = decode_tokens + load.prefill_tokens
        terms: dict[str, Counts] = dict.fromkeys(Term, 0)
        for part, fits in self._parts.values():
            priced = fits.get(phase) or next(iter(fits.values()))
            value = priced.ns(load, tokens)
            for term, share in _shares(part, decode_tokens, tokens):
                terms[term] = terms[term] + whole_ns(value * share)
        d2h = load.mirrored_tokens * self._token_bytes
        h2d = whole_ns(load.missed_millirows * 1e-3 * self._token_bytes)
        h2d = h2d + load.staged_pages * (PAGE_TOKENS * self._token_bytes)
        return StepCost(terms=terms, total_ns=sum(terms.values()), h2d_bytes=h2d, d2h_bytes=d2h)

    def front_end_ns(self, prompt_tokens: int) -> int:
        """Query: nothing, whatever the prompt: a calibrated engine is fed in its own process."""
        return 0

    def idle_start_ns(self) -> int:
        """Query: as measured."""
        return self.calibration.idle_start_ns

    def sources(self) -> Mapping[str, str]:
        """Query: where the figures of each term come from."""
        made = self.calibration
        machine = made.machine.get("name", made.device)
        sources: dict[str, str] = {}
        for name, part in made.parts.items():
            errors = ", ".join(
                f"{phase.value} {fit.num_points} steps, left-out error {fit.median_error:.1%}"
                for phase, fit in part.fits.items()
            )
            for term in {part.decode, part.prefill}:
                text = f"calibration of {made.date[:10]} on {machine}: {name} ({errors})"
                sources[term] = f"{sources[term]}; {name}" if term in sources else text
        return sources


def _shares(part: PartFit, decode_tokens: int, tokens: int) -> tuple[tuple[Term, float], ...]:
    """Query: the terms of a part and their shares: by tokens, as the runner's clock splits them."""
    if part.decode is part.prefill or decode_tokens in (0, tokens):
        return ((part.decode if decode_tokens else part.prefill, 1.0),)
    share = decode_tokens / tokens
    return ((part.decode, share), (part.prefill, 1.0 - share))
