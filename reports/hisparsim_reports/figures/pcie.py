"""What crossed PCIe, both ways, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results import RunResult

from ..numbers import three_digits
from .multiples import Layer, draw_stacks
from .style import smoothed

TITLE = "PCIe traffic of one GPU"
CAPTION = (
    "Bytes moved between host and GPU memory, with the mean over the run and what the link can carry. "
    "Smoothed over some hundredths of the run; policies that move none are left out."
)
_WAYS = (("h2d_bytes", "host to GPU", "#D55E00"), ("d2h_bytes", "GPU to host", "#009E73"))


def draw(runs: Sequence[RunResult]) -> Any:
    """Query: the figure, or None where no run moved anything."""
    return draw_stacks(runs, _layers, _note, "GB/s", stacked=False)


def _layers(_: RunResult, line: Mapping[str, NDArray[np.float64]]) -> list[Layer]:
    layers = [
        Layer(name, colour, smoothed(line[column] / np.maximum(line["width_s"], 1e-12) / 1e9, 5))
        for column, name, colour in _WAYS
        if column in line
    ]
    return layers if any(layer.values.any() for layer in layers) else []


def _note(run: RunResult, layers: Sequence[Layer]) -> str:
    """Query: the mean rate each way, and the link's limit where the run knows it."""
    told = []
    for (column, _, _), layer in zip(_WAYS, layers, strict=False):
        limit = run.summary.get(f"{column}_per_s")
        of = f" of {three_digits(limit / 1e9)}" if limit else ""
        told.append(f"{layer.name} {three_digits(float(layer.values.mean()))}{of} GB/s")
    return " · ".join(told)
