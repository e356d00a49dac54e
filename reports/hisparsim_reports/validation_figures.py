"""Figures of a validation: simulated against measured, distributions and timelines over one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results import SERVED, RunResult
from hisparsim.results.timeline import bin_timeline

from .figures import Figure
from .figures.style import DPI, INK, MUTED, house_style, policy_colour

BAND = 0.10
"""Relative error that the scatter's band shows."""
SCATTERED = ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "output_tokens_per_s")
_TITLES = {
    "ttft_s.p50": "median TTFT, s",
    "ttft_s.p95": "TTFT, 95th percentile, s",
    "tpot_s.p50": "median TPOT, s",
    "output_tokens_per_s": "output tokens/s",
}
_MARKS = ("o", "s", "^", "D", "v", "P")
_NUM_BINS = 160


@dataclass(frozen=True, eq=False)
class Pair:
    """One policy on one workload in both worlds."""

    workload: str
    simulated: RunResult
    measured: RunResult


def draw_validation(document: Mapping[str, Any], pairs: Sequence[Pair]) -> list[Figure]:
    """Query: the figures of a validation (its JSON document and the runs); equal input gives equal bytes."""
    drawn = [
        (
            "validation_scatter",
            "Simulated against measured",
            f"One mark a policy and workload; within the band the simulation is off by at most {BAND:.0%}.",
            _scatter(document),
        ),
        (
            "validation_cdf",
            "Time to first token, both worlds",
            "Share of requests whose first token had come. Full lines measured, dotted ones simulated.",
            _distributions(pairs),
        ),
        (
            "validation_timeline",
            "Running requests over time, both worlds",
            "Full lines measured, dotted ones simulated.",
            _timelines(pairs),
        ),
        (
            "validation_budget",
            "Error budget",
            "What each part of a step adds to the error of the whole: the measured run's own steps, priced "
            "by the cost model, less what the clock measured, over the measured time.",
            _budgets(document),
        ),
    ]
    figures = []
    for name, title, caption, draw in drawn:
        with house_style():
            figures.append(Figure(name, title, caption, _png(draw)))
    return figures


def _png(draw: Any) -> bytes:
    from matplotlib import pyplot as plt

    figure = draw(plt)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def _scatter(document: Mapping[str, Any]) -> Any:
    names = list(dict.fromkeys(entry["name"] for entry in document["workloads"]))

    def draw(plt: Any) -> Any:
        figure, grid = plt.subplots(
            1, len(SCATTERED), figsize=(3.1 * len(SCATTERED), 3.6), layout="constrained"
        )
        for axes, metric in zip(np.atleast_1d(grid), SCATTERED, strict=True):
            points = [
                (entry["name"], entry["policy"], check["measured"], check["simulated"])
                for entry in document["workloads"]
                for check in entry["metrics"]
                if check["name"] == metric and check["measured"] > 0 and check["simulated"] > 0
            ]
            if not points:
                axes.set_visible(False)
                continue
            values = [value for point in points for value in point[2:]]
            low, high = min(values) / 1.3, max(values) * 1.3
            line = np.array([low, high])
            axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="#E9EDF2", lw=0, zorder=1)
            axes.plot(line, line, color=MUTED, lw=0.8, zorder=2)
            for workload, policy, measured, simulated in points:
                mark = _MARKS[names.index(workload) % len(_MARKS)]
                style = {"color": policy_colour(policy), "mec": "white", "mew": 0.7, "zorder": 3}
                axes.plot(measured, simulated, mark, ms=7, **style)
            axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
            axes.set_aspect("equal")
            for axis in (axes.xaxis, axes.yaxis):
                _label_plainly(axis)
            axes.set_title(_TITLES[metric])
            axes.set_xlabel("measured")
        np.atleast_1d(grid)[0].set_ylabel("simulated")
        _legend(figure, plt, document, names)
        return figure

    return draw


def _label_plainly(axis: Any) -> None:
    """Change: a logarithmic axis has plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, plt: Any, document: Mapping[str, Any], names: Sequence[str]) -> None:
    """Change: a key below: marks by workload, colours by policy."""
    policies = list(dict.fromkeys(entry["policy"] for entry in document["workloads"]))
    marks = [
        plt.Line2D([], [], color=INK, marker=_MARKS[place % len(_MARKS)], ls="", label=name)
        for place, name in enumerate(names)
    ]
    colours = [
        plt.Line2D([], [], color=policy_colour(policy), marker="o", ls="", label=policy)
        for policy in policies
    ]
    figure.legend(handles=[*marks, *colours], loc="outside lower center", ncols=len(marks) + len(colours))


def _distributions(pairs: Sequence[Pair]) -> Any:
    def one(axes: Any, pair: Pair) -> None:
        colour = policy_colour(pair.measured.policy)
        for run, dots in ((pair.measured, "-"), (pair.simulated, ":")):
            waits = _ttft_s(run)
            if len(waits):
                shares = np.arange(1, len(waits) + 1) / len(waits)
                axes.step(waits, shares, where="post", color=colour if dots == "-" else INK, ls=dots, lw=1.8)
        axes.set_xscale("log")
        _label_plainly(axes.xaxis)
        axes.set_ylim(0, 1.02)

    return _grid(pairs, one, "time to first token, s", "share of requests")


def _timelines(pairs: Sequence[Pair]) -> Any:
    def one(axes: Any, pair: Pair) -> None:
        colour = policy_colour(pair.measured.policy)
        for run, dots in ((pair.measured, "-"), (pair.simulated, ":")):
            binned = bin_timeline(run, _NUM_BINS)
            if len(binned["start_s"]) and "running" in binned:
                axes.plot(
                    binned["start_s"],
                    binned["running"],
                    color=colour if dots == "-" else INK,
                    ls=dots,
                    lw=1.3,
                )
        axes.set_ylim(bottom=0)

    return _grid(pairs, one, "seconds", "running requests")


def _grid(pairs: Sequence[Pair], one: Any, xlabel: str, ylabel: str) -> Any:
    """Query: panels, a row a workload and a column a policy."""
    rows = list(dict.fromkeys(pair.workload for pair in pairs))
    columns = list(dict.fromkeys(pair.measured.policy for pair in pairs))

    def draw(plt: Any) -> Any:
        size = (2.9 * len(columns) + 0.6, 2.1 * len(rows) + 0.5)
        figure, grid = plt.subplots(
            len(rows), len(columns), figsize=size, layout="constrained", squeeze=False
        )
        for axes in grid.flat:
            axes.set_visible(False)
        for pair in pairs:
            axes = grid[rows.index(pair.workload), columns.index(pair.measured.policy)]
            axes.set_visible(True)
            one(axes, pair)
            axes.set_title(f"{pair.workload}, {pair.measured.policy}", fontsize=9)
        for axes in grid[-1]:
            axes.set_xlabel(xlabel)
        for axes in grid[:, 0]:
            axes.set_ylabel(ylabel)
        return figure

    return draw


def _budgets(document: Mapping[str, Any]) -> Any:
    entries = document["workloads"]
    parts = list(dict.fromkeys(line["part"] for entry in entries for line in entry["budget"]["lines"]))
    shares: NDArray[np.float64] = np.zeros((len(parts), len(entries)))
    for column, entry in enumerate(entries):
        for line in entry["budget"]["lines"]:
            shares[parts.index(line["part"]), column] = 100 * line["share_of_error"]
    order = np.argsort(-np.abs(shares).max(axis=1))

    def draw(plt: Any) -> Any:
        size = (2.2 + 0.75 * len(entries), 1.4 + 0.32 * len(parts))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        limit = max(float(np.abs(shares).max()), 1.0)
        axes.imshow(shares[order], cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        for (row, column), value in np.ndenumerate(shares[order]):
            colour = "white" if abs(value) > 0.6 * limit else INK
            axes.text(column, row, f"{value:+.1f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_yticks(range(len(parts)), [parts[place].replace("_", " ") for place in order])
        labels = [f"{entry['name']}\n{entry['policy']}" for entry in entries]
        axes.set_xticks(range(len(entries)), labels, rotation=60, ha="right", fontsize=8)
        axes.grid(False)
        axes.set_title("per cent of the measured time")
        return figure

    return draw


def _ttft_s(run: RunResult) -> NDArray[np.float64]:
    requests = run.requests
    served = run.has_status(*SERVED)
    waits = (requests["first_token_ns"] - requests["arrival_ns"])[served] / 1e9
    return np.maximum(np.sort(waits), 1e-6)
