"""One look for all figures: colours that stay with their meaning, labels beside the lines, units on axes.

Colours are from the palette of Okabe and Ito (Color Universal Design, 2008), told apart with any common
colour vision.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

POLICY_COLOURS = {
    "gpu-only": "#000000",
    "prefix-offload": "#E69F00",
    "host-resident": "#CC79A7",
    "hybrid": "#0072B2",
    "hybrid-spill": "#56B4E9",
    "never-admit": "#999999",
    "thrash": "#D55E00",
}
_OTHER_COLOURS = ("#009E73", "#B8A800", "#7B4FA3", "#8C564B")
INK, MUTED, GRID = "#222222", "#6B6B6B", "#E3E3E3"
DPI = 130
_LABEL_POINTS = 13.0

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#9A9A9A",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "hisparsim",
}


def policy_colour(policy: str) -> str:
    """Query: the colour of a policy, the same in every figure and every report."""
    if policy in POLICY_COLOURS:
        return POLICY_COLOURS[policy]
    return _OTHER_COLOURS[zlib.crc32(policy.encode()) % len(_OTHER_COLOURS)]


@contextmanager
def house_style() -> Iterator[None]:
    """Change: matplotlib settings of the block; the backend draws to files only."""
    import matplotlib

    matplotlib.use("Agg")
    settings: Any = _RC  # its stub wants every key as a literal
    with matplotlib.rc_context(settings):
        yield


def time_unit(end_s: float) -> tuple[float, str]:
    """Query: (seconds a unit, its name) for a time axis that ends at ``end_s``."""
    if end_s > 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if end_s > 300 else (1.0, "seconds")


def line_width(i: int, num_lines: int) -> float:
    """Query: width of the i-th of several lines; later ones are thinner, so that equal lines all show."""
    return 1.5 + 0.6 * (num_lines - 1 - i)


def direct_labels(
    axes: Any, labels: Sequence[tuple[float, str, str]], *, height_points: float = 13.0
) -> None:
    """Change: write (value, text, colour) labels beside the axes at their value, apart from each other.

    The value is on the y axis, whose limits must be final.
    """
    axes_points = axes.get_window_extent().height * 72 / axes.figure.dpi
    low, high = axes.get_ylim()
    ordered = sorted(labels)
    wanted = [(min(max(value, low), high) - low) / (high - low) * axes_points for value, _, _ in ordered]
    for (_, text, colour), at in zip(ordered, spread(wanted, _LABEL_POINTS, axes_points), strict=True):
        place = {"transform": axes.transAxes, "va": "center", "fontsize": 9, "fontweight": "bold"}
        axes.text(1.02, at / axes_points, text, color=colour, **place)


def spread(wanted: Sequence[float], gap: float, end: float) -> list[float]:
    """Query: ascending positions at least ``gap`` apart within [0, end], close to the ``wanted`` ones."""
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + gap) if placed else max(position, 0.0))
    ceiling = max(end, gap * (len(placed) - 1))
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def smoothed(values: NDArray[np.float64], num_bins: int) -> NDArray[np.float64]:
    """Query: the running mean over ``num_bins`` neighbouring bins, narrower at both ends."""
    if num_bins <= 1 or len(values) < num_bins:
        return values
    kernel = np.ones(num_bins)
    mean: NDArray[np.float64] = np.convolve(values, kernel, "same") / np.convolve(
        np.ones(len(values)), kernel, "same"
    )
    return mean
