"""Small multiples: one panel a policy, one scale of values for all, a key above.

The time axis is the same for all, unless one run lasts several times as long as another: then each panel has
its own and says so, for on a common one the shorter run would be a sliver.
"""

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
_COMMON_AXIS_RATIO = 3.0
"""Runs whose lengths differ by less than this factor share one time axis."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One named quantity over time, with its colour."""

    name: str
    colour: str
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Panel:
    run: RunResult
    edges_s: NDArray[np.float64]
    layers: list[Layer]

    @property
    def end_s(self) -> float:
        return float(self.edges_s[-1])

    def height(self, stacked: bool) -> float:
        """Query: the largest value that the panel shows."""
        values = [layer.values for layer in self.layers]
        return float(np.sum(values, axis=0).max() if stacked else np.max(values))


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

    panels = _panels(runs, layers_of)
    if not panels:
        return None
    ends_s = [panel.end_s for panel in panels]
    common = max(ends_s) <= _COMMON_AXIS_RATIO * min(ends_s)
    panel_in = _PANEL_HEIGHT_IN if common else _PANEL_HEIGHT_IN + 0.35
    height_in = 0.95 + panel_in * len(panels)
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9.0, height_in), sharex=common, sharey=True, squeeze=False
    )
    figure.subplots_adjust(
        left=0.09,
        right=0.985,
        top=1 - 0.6 / height_in,
        bottom=0.5 / height_in,
        hspace=0.34 if common else 0.72,
    )
    top = max(panel.height(stacked) for panel in panels)
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        end_s = max(ends_s) if common else panel.end_s
        scale, unit = time_unit(end_s)
        _draw_panel(axes, panel, scale, stacked)
        axes.set_title(panel.run.policy, color=policy_colour(panel.run.policy))
        note = note_of(panel.run, panel.layers)
        axes.set_title(note, loc="right", fontsize=9, color=MUTED, fontweight="normal")
        axes.set_ylabel(ylabel)
        axes.set_ylim(0, top * 1.03 if top else 1)
        axes.set_xlim(0, end_s / scale)
        axes.grid(False, axis="x")
        if not common or panel is panels[-1]:
            own = "" if common else ", an axis of its own"
            axes.set_xlabel(f"simulated time ({unit}{own})", color=MUTED)
    _draw_key(figure, panels)
    return figure


def _panels(
    runs: Sequence[RunResult],
    layers_of: Callable[[RunResult, Mapping[str, NDArray[np.float64]]], list[Layer]],
) -> list[_Panel]:
    panels = []
    for run in runs:
        line = bin_timeline(run, _NUM_BINS)
        layers = layers_of(run, line) if len(line["start_s"]) else []
        if layers:
            edges_s = np.append(line["start_s"], line["start_s"][-1] + line["width_s"][-1])
            panels.append(_Panel(run, edges_s, layers))
    return panels


def _draw_panel(axes: Any, panel: _Panel, scale: float, stacked: bool) -> None:
    """Change: the layers on top of each other as filled steps, or each as a line."""
    edges = panel.edges_s / scale
    base = np.zeros(len(edges) - 1)
    for layer in panel.layers:
        if stacked:
            lower, base = base, base + layer.values
            corners = (np.append(curve, curve[-1]) for curve in (lower, base))
            axes.fill_between(edges, *corners, step="post", color=layer.colour, lw=0)
        else:
            axes.stairs(layer.values, edges, color=layer.colour, lw=1.5)


def _draw_key(figure: Any, panels: Sequence[_Panel]) -> None:
    """Change: the names of the layers that any panel shows, in the layers' order."""
    from matplotlib.patches import Patch

    layers = [layer for panel in panels for layer in panel.layers]
    seen = {layer.name for layer in layers if layer.values.any()}
    named = {layer.name: layer.colour for layer in layers if layer.name in seen}
    handles = [Patch(color=colour, label=name) for name, colour in named.items()]
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
