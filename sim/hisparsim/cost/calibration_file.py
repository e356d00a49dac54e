"""What `hisparsim calibrate` writes and the cost source `calibration` reads: fits of a step's parts, links.

A *part* is one stretch of a step's work (projections, indexer, experts, ...). Its time is

    constant + curve(tokens) + sum over features of (ns x feature of the load)

fitted apart for steps that only decode (in a graph, where the device has graphs) and for others. The
features are counts of :class:`hisparsim.cost.load.StepLoad`, so that what was measured and what is priced
are described by the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hisparsim.cost.curve import Curve, CurveError, either
from hisparsim.cost.load import StepLoad
from hisparsim.cost.terms import Term
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.models import ModelSpec
from hisparsim.specs.scenario import Scenario

FORMAT = "hisparsim-calibration/1"

FEATURES: Mapping[str, Callable[[StepLoad], Any]] = MappingProxyType(
    {
        "num_decodes": lambda load: load.num_decodes,
        "num_prefills": lambda load: load.num_prefills,
        "prefill_tokens": lambda load: load.prefill_tokens,
        "prefill_past_tokens": lambda load: load.prefill_past_tokens,
        "sampled_tokens": lambda load: load.decode_tokens + load.num_prefills,
        "prefill_selected_rows": lambda load: load.prefill_selected_rows,
        "selected_rows": lambda load: load.selected_rows,
        "sum_context_tokens": lambda load: load.sum_context_tokens,
        "hot_requests": lambda load: load.hot_requests,
        "has_misses": lambda load: either(load.missed_millirows, 1.0, 0.0),
        "missed_rows": lambda load: load.missed_millirows * 1e-3,
        "staged_pages": lambda load: load.staged_pages,
        "has_mirror": lambda load: either(load.mirrored_tokens, 1.0, 0.0),
        "mirrored_tokens": lambda load: load.mirrored_tokens,
        "write_back_mib": lambda load: load.write_back_bytes * 2.0**-20,
        "resolves": lambda load: 1.0 if load.resolve else 0.0,
    }
)
"""What a part's time can depend on: name -> a count of a load (an int, a float, or an array one a step)."""


class CalibrationError(ScenarioError):
    """A calibration file that cannot be used: not one, or made for something else."""


class Phase(StrEnum):
    """Kinds of steps that are fitted apart."""

    DECODE = "decode"
    """Decodes only."""
    MIXED = "mixed"
    """With a prefill."""


@dataclass(frozen=True)
class Fit:
    """The time of one part in one kind of step."""

    constant_ns: float
    tokens: tuple[int, ...]
    """Where the curve over the step's tokens has its points; empty = no curve."""
    tokens_ns: tuple[float, ...]
    linear_ns: Mapping[str, float]
    """Feature -> nanoseconds of one of it."""
    num_points: int = 0
    """Steps that it was fitted to."""
    median_error: float = 0.0
    """Median relative error on steps left out of the fit."""
    sum_error: float = 0.0
    """Relative error of the sum over steps left out."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.linear_ns if name not in FEATURES]
        if unknown:
            raise CalibrationError(f"unknown feature {unknown[0]!r}; known: {', '.join(FEATURES)}")
        if len(self.tokens) != len(self.tokens_ns):
            raise CalibrationError(f"a curve has {len(self.tokens)} tokens and {len(self.tokens_ns)} times")

    def curve(self) -> Curve | None:
        """Query: the curve over tokens, None where there is none."""
        if not self.tokens:
            return None
        try:
            return Curve(self.tokens, self.tokens_ns)
        except CurveError as error:
            raise CalibrationError(str(error)) from None


@dataclass(frozen=True)
class PartFit:
    """One part: the terms that its time is booked on, and its fits."""

    decode: Term
    """Of decode tokens (and of everything where both terms are the same)."""
    prefill: Term
    fits: Mapping[Phase, Fit]
    """A phase that was never measured has none: steps of that kind take the other's."""


@dataclass(frozen=True)
class CalibratedLinks:
    """Bytes a second between the tiers as measured; `duplex` = while the other direction is busy."""

    h2d: float
    d2h: float
    h2d_duplex: float
    d2h_duplex: float
    gather: float


@dataclass(frozen=True)
class Calibration:
    """The contents of a calibration file."""

    device: str
    """`cpu` or `cuda`."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    model: Mapping[str, Any]
    """Geometry of the (sliced) model, field by field."""
    row_format: str
    num_ranks: int
    uses_graphs: bool
    """Decode steps run in graphs padded to a batch size; otherwise each is as large as its batch."""
    parts: Mapping[str, PartFit]
    links: CalibratedLinks
    idle_start_ns: int = 0
    """What the first step after idling takes longer, from the arrival that ends it: the engine has to look
    up, and others have used the caches meanwhile."""
    notes: tuple[str, ...] = ()

    def check_model(self, model: ModelSpec, row_format: str, num_ranks: int) -> None:
        """Raise CalibrationError where the calibration was made for something else."""
        for name, value in model.model_dump(mode="json", exclude={"name"}).items():
            if self.model.get(name, value) != value:
                raise CalibrationError(
                    f"the calibration was made for a model with {name} = {self.model[name]}, {model.name} "
                    f"has {value}: set model.preset to the model that was calibrated (hisparsim calibrate "
                    "leaves it beside its file), or calibrate this one (hisparsim calibrate --scenario)"
                )
        if self.row_format != row_format:
            raise CalibrationError(
                f"the calibration was made with rows of {self.row_format}, the scenario has {row_format}: "
                "set kv.dtype or calibrate again"
            )
        if self.num_ranks != num_ranks:
            raise CalibrationError(
                f"the calibration was made with {self.num_ranks} ranks, the scenario has {num_ranks} "
                "(parallel.tp x parallel.dp): set these or calibrate again"
            )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Change: write the file, human-readable JSON."""
    table = {"format": FORMAT, **asdict(calibration)}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> Calibration:
    """Query: the calibration in a file.

    Raises:
        CalibrationError: no such file, or not a calibration.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(
            f"calibration file {str(path)!r} does not exist: make it with hisparsim calibrate --out {path}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CalibrationError(f"calibration file {str(path)!r} cannot be read: {error}") from None
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise CalibrationError(f"{str(path)!r} is not a calibration file of format {FORMAT}")
    try:
        parts = {name: _part(part) for name, part in table.pop("parts").items()}
        links = CalibratedLinks(**table.pop("links"))
        return Calibration(**(table | {"parts": parts, "links": links, "notes": tuple(table["notes"])}))
    except CalibrationError as error:
        raise CalibrationError(f"calibration file {str(path)!r}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CalibrationError(f"calibration file {str(path)!r} is damaged: {error}") from None


def _part(table: dict[str, Any]) -> PartFit:
    fits = {}
    for phase, fit in table["fits"].items():
        lists = {"tokens": tuple(fit["tokens"]), "tokens_ns": tuple(fit["tokens_ns"])}
        fits[Phase(phase)] = Fit(**(fit | lists))
    return PartFit(Term(table["decode"]), Term(table["prefill"]), fits)


def calibration_of(scenario: Scenario) -> Calibration:
    """Query: the calibration that a scenario names.

    Raises:
        CalibrationError: it names none, or the file cannot be read.
    """
    name = scenario.cost.calibration
    if name is None:
        raise CalibrationError("cost.source = calibration: name the file, as in cost.source=calibration:FILE")
    path = Path(name)
    return _read(path, path.stat().st_mtime_ns if path.exists() else 0)


@cache
def _read(path: Path, changed_ns: int) -> Calibration:
    """Query: a file once read, until it changes."""
    assert changed_ns >= 0
    return read_calibration(path)
