"""The load over time: requests running, requests waiting, output tokens a second, by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparsim.results import RunResult
from hisparsim.results.timeline import bin_timeline

from ..numbers import three_digits
from .style import MUTED, direct_labels, line_width, policy_colour, smoothed, time_unit

TITLE = "Running requests and throughput over time"
CAPTION = (
    "Means over short intervals of the simulated time. Beside each name stands the mean over the time with "
    "a request in the system; a line ends when its last request does."
)
_NUM_BINS = 240


def draw(runs: Sequence[RunResult]) -> Any:
    """Query: the figure, or None where no run made a step."""
    from matplotlib import pyplot as plt

    lines = [(run.policy, bin_timeline(run, _NUM_BINS)) for run in runs]
    lines = [(policy, line) for policy, line in lines if len(line["start_s"])]
    if not lines:
        return None
    end_s = max(float(line["start_s"][-1] + line["width_s"][-1]) for _, line in lines)
    scale, unit = time_unit(end_s)
    figure, panels = plt.subplots(3, 1, figsize=(9.0, 7.0), sharex=True, height_ratios=(3, 2, 3))
    figure.subplots_adjust(left=0.09, right=0.81, top=0.96, bottom=0.07, hspace=0.28)
    titles = ("Requests running", "Requests waiting", "Decoded tokens per second, whole node")
    for axes, title, series in zip(panels, titles, (_running, _waiting, _throughput), strict=True):
        labels = []
        for i, (policy, line) in enumerate(lines):
            values = series(line)
            if values is None:
                continue
            middle = (line["start_s"] + line["width_s"] / 2) / scale
            axes.plot(middle, values, lw=line_width(i, len(lines)), color=policy_colour(policy))
            busy = line["in_system"] > 0
            mean = float(values[busy].mean()) if busy.any() else 0.0
            labels.append((mean, f"{policy} {three_digits(mean)}", policy_colour(policy)))
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, end_s / scale)
        direct_labels(axes, labels)
    panels[-1].set_xlabel(f"simulated time ({unit})", color=MUTED)
    return figure


def _running(line: Any) -> Any:
    return line.get("running")


def _waiting(line: Any) -> Any:
    return line.get("waiting")


def _throughput(line: Any) -> Any:
    if "decode_tokens" not in line:
        return None
    return smoothed(line["decode_tokens"] / np.maximum(line["width_s"], 1e-12), 5)
