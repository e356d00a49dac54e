"""Small multiples: one panel a policy, one time axis and one scale for all, a key above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results import RunResult
from hisparsim.results.timeline import bin_timeline

from .style import MUTED, policy_colour, time_unit

_NUM_BINS = 240
_PANEL_HEIGHT_IN = 1.75


@dataclass(frozen=True, slots=True)
class Layer:
    """One named quantity over time, with its colour."""

    name: str
    colour: str
    values: NDArray[np.float64]


def draw_stacks(
    runs: Sequence[RunResult],
    layers_of: Callable[[RunResult, Mapping[str, NDArray[np.float64]]], list[Layer]],
    note_of: Callable[[RunResult, Sequence[Layer]], str],
    ylabel: str,
    *,
    stacked: bool = True,
) -> Any:
    """Query: a figure with one panel a run that has any layer, or None where no run has one.

    ``note_of`` gives the figures that stand beside a panel's title.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    panels = []
    end_s = 0.0
    for run in runs:
        line = bin_timeline(run, _NUM_BINS)
        layers = layers_of(run, line) if len(line["start_s"]) else []
        if len(line["start_s"]):
            end_s = max(end_s, float(line["start_s"][-1] + line["width_s"][-1]))
        if layers:
            panels.append((run, line, layers))
    if not panels:
        return None
    scale, unit = time_unit(end_s)
    top = max(_height(layers, stacked) for _, _, layers in panels)
    height = 0.95 + _PANEL_HEIGHT_IN * len(panels)
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9.0, height), sharex=True, sharey=True, squeeze=False
    )
    figure.subplots_adjust(left=0.09, right=0.985, top=1 - 0.6 / height, bottom=0.5 / height, hspace=0.34)
    for axes, (run, line, layers) in zip(grid[:, 0], panels, strict=True):
        edges = np.append(line["start_s"], line["start_s"][-1] + line["width_s"][-1]) / scale
        base = np.zeros(len(line["start_s"]))
        for layer in layers:
            if stacked:
                lower, base = base, base + layer.values
                corners = (np.append(curve, curve[-1]) for curve in (lower, base))
                axes.fill_between(edges, *corners, step="post", color=layer.colour, lw=0)
            else:
                axes.stairs(layer.values, edges, color=layer.colour, lw=1.5)
        axes.set_title(run.policy, color=policy_colour(run.policy))
        axes.set_title(note_of(run, layers), loc="right", fontsize=9, color=MUTED, fontweight="normal")
        axes.set_ylabel(ylabel)
        axes.set_ylim(0, top * 1.03 if top else 1)
        axes.set_xlim(0, end_s / scale)
        axes.grid(False, axis="x")
    grid[-1, 0].set_xlabel(f"simulated time ({unit})", color=MUTED)
    named = {layer.name: layer.colour for _, _, layers in panels for layer in layers}
    seen = {layer.name for _, _, layers in panels for layer in layers if layer.values.any()}
    handles = [Patch(color=colour, label=name) for name, colour in named.items() if name in seen]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.08, 1.0),
        ncols=len(handles),
        fontsize=9,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    return figure


def _height(layers: Sequence[Layer], stacked: bool) -> float:
    values = [layer.values for layer in layers]
    return float(np.sum(values, axis=0).max() if stacked else np.max(values))
