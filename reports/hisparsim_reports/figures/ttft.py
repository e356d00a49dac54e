"""How long users wait for the first token: the distribution of TTFT by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparsim.results import SERVED, RunResult
from hisparsim.results.metrics import warmup_ns_of

from ..numbers import seconds
from .style import INK, MUTED, line_width, policy_colour

TITLE = "Time to first token"
CAPTION = (
    "Share of the requests whose first token had come after that time. Dots: median and 90th percentile; "
    "further left is better."
)


def draw(runs: Sequence[RunResult]) -> Any:
    """Query: the figure, or None where no request of any run finished."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    waits = [(run.policy, _ttft_s(run)) for run in runs]
    waits = [(policy, wait) for policy, wait in waits if len(wait)]
    if not waits:
        return None
    figure, axes = plt.subplots(figsize=(9.0, 4.0), layout="constrained")
    for i, (policy, wait) in enumerate(waits):
        colour = policy_colour(policy)
        shares = np.arange(1, len(wait) + 1) / len(wait)
        axes.step(wait, shares, where="post", color=colour, lw=line_width(i, len(waits)))
        marks = np.percentile(wait, (50, 90))
        axes.plot(marks, (0.5, 0.9), "o", color=colour, ms=5, mec="white", mew=0.8, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_minor_locator(LogLocator(10, subs=(2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_formatter(FuncFormatter(_tick) if high < 300 * low else NullFormatter())
    axes.grid(True, axis="x", which="minor", lw=0.4)
    axes.set_ylim(0, 1.02)
    axes.set_yticks((0, 0.25, 0.5, 0.75, 1), ("0", "25 %", "50 %", "75 %", "100 %"))
    axes.set_xlabel("time to first token (log scale)")
    axes.set_ylabel("share of requests")
    _key(axes, waits)
    return figure


def _tick(value: float, _: int) -> str:
    """Query: a tick's label: ``20 ms``, ``5 s``."""
    return f"{value * 1e3:g} ms" if value < 0.999 else f"{value:,.6g} s"


def _key(axes: Any, waits: Sequence[tuple[str, Any]]) -> None:
    """Change: a column beside the axes: the policies by median, with their figures."""
    ordered = sorted(waits, key=lambda pair: float(np.median(pair[1])))
    style = {"transform": axes.transAxes, "va": "top"}
    top, line = 0.97, 0.062
    for i, (policy, wait) in enumerate(ordered):
        p50, p90, p99 = np.percentile(wait, (50, 90, 99))
        y = top - i * 3.6 * line
        axes.text(1.03, y, policy, color=policy_colour(policy), weight="bold", **style)
        axes.text(1.03, y - line, f"median {seconds(p50)}", color=INK, fontsize=9, **style)
        rest = f"p90 {seconds(p90)} · p99 {seconds(p99)}"
        axes.text(1.03, y - 2 * line, rest, color=MUTED, fontsize=9, **style)


def _ttft_s(run: RunResult) -> Any:
    requests = run.requests
    measured = run.has_status(*SERVED) & (requests["arrival_ns"] >= warmup_ns_of(run))
    waits = np.sort((requests["first_token_ns"] - requests["arrival_ns"])[measured]) / 1e9
    return np.maximum(waits, 1e-6)  # a log axis has no place for a wait of nothing
