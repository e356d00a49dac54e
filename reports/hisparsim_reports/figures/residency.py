"""Who was in which residency state when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results import RunResult

from ..numbers import three_digits
from .multiples import Layer, draw_stacks

TITLE = "Running requests by residency state"
CAPTION = (
    "Full: every computed page is readable on the GPU. Mixed: some pages are, the others are read through "
    "the hot buffer. None: at most two pages are."
)
_STATES = (
    ("num_full", "full", "#0072B2"),
    ("num_mixed", "mixed", "#56B4E9"),
    ("num_none", "none", "#E69F00"),
)


def draw(runs: Sequence[RunResult]) -> Any:
    """Query: the figure, or None where no run recorded states."""
    return draw_stacks(runs, _layers, _note, "requests")


def _layers(_: RunResult, line: Mapping[str, NDArray[np.float64]]) -> list[Layer]:
    return [Layer(name, colour, line[column]) for column, name, colour in _STATES if column in line]


def _note(_: RunResult, layers: Sequence[Layer]) -> str:
    """Query: the mean of each state over the run."""
    told = [f"{layer.name} {three_digits(float(layer.values.mean()))}" for layer in layers]
    return f"mean: {', '.join(told)}"
