"""Figures of a sweep, chosen by its shape.

| what varies | figures |
|---|---|
| anything | throughput per GPU against tokens/s/user, with the front |
| one axis of numbers | lines over it, bands over seeds |
| two | a heat map a policy |
| three and more | heat maps of the two that matter most (the others at their best), parallel coordinates |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from .figures import Figure
from .figures.style import DPI, INK, MUTED, direct_labels, house_style, policy_colour
from .sweep_data import Row, SweepData, metric_name, number

X_METRIC, Y_METRIC = "tokens_per_s_per_user", "total_tokens_per_s_per_gpu"
LINE_METRICS = ("output_tokens_per_s", "ttft_s.p99", "tpot_s.p50")
MAX_PANELS = 6


def draw_sweep(data: SweepData) -> list[Figure]:
    """Query: the figures that suit the sweep; none where fewer than two scenarios ran."""
    if len(data.ran) < 2:
        return []
    drawings: list[Callable[[SweepData], Figure | None]] = [draw_front]
    axes = data.numeric_axes
    if len(axes) == 1:
        drawings.append(draw_lines)
    elif len(axes) >= 2:
        drawings.append(draw_heat_maps)
    if len(axes) >= 3:
        drawings.append(draw_parallel)
    with house_style():
        figures = [draw(data) for draw in drawings]
    return [figure for figure in figures if figure is not None]


def draw_front(data: SweepData) -> Figure | None:
    """Query: every scenario by one user's speed and the throughput of a GPU, and each policy's front."""
    points = [(number(row, X_METRIC), number(row, Y_METRIC), row) for row in data.ran]
    known = [(x, y, row) for x, y, row in points if x is not None and y is not None]
    if len(known) < 2:
        return None
    figure, axes = _canvas(9.0, 5.0)
    labels: list[tuple[float, str, str]] = []
    for policy in data.policies:
        mine = [(x, y) for x, y, row in known if row["policy"] == policy]
        if not mine:
            continue
        colour = policy_colour(policy)
        axes.scatter(*zip(*mine, strict=True), s=26, color=colour, alpha=0.55, linewidths=0)
        front = front_of(mine)
        axes.plot(*zip(*front, strict=True), color=colour, linewidth=1.8, drawstyle="steps-pre")
        labels.append((front[-1][1], policy, colour))
    broken = [(x, y) for x, y, row in known if not row["feasible"]]
    if broken:
        axes.scatter(*zip(*broken, strict=True), s=60, facecolors="none", edgecolors=MUTED, linewidths=0.8)
    axes.set_xlabel("tokens/s/user (1 / mean TPOT)")
    axes.set_ylabel("total tokens/s/GPU")
    axes.margins(0.06)
    if min(y for _, y, _ in known) < 0.5 * max(y for _, y, _ in known):
        axes.set_ylim(bottom=0)
    direct_labels(axes, labels)
    ringed = " Ringed points break a constraint." if broken else ""
    return Figure(
        "front",
        "Throughput against speed",
        "One point a scenario; up and to the right is better. Lines join the scenarios of a policy that none "
        f"of its others beats in both.{ringed}",
        _png(figure),
    )


def draw_lines(data: SweepData) -> Figure | None:
    """Query: metrics over the one axis of numbers, a line a policy, the mean with the range over seeds."""
    axis = data.numeric_axes[0]
    metrics = _shown_metrics(data)
    figure, panels = _canvas(4.3 * len(metrics), 3.8, len(metrics))
    for panel, metric in zip(np.atleast_1d(panels), metrics, strict=True):
        for policy in data.policies:
            xs, groups = _grouped(data, policy, axis, metric)
            if not xs:
                continue
            colour = policy_colour(policy)
            panel.plot(xs, [sum(g) / len(g) for g in groups], color=colour, marker="o", ms=4, label=policy)
            if any(len(group) > 1 for group in groups):
                panel.fill_between(
                    xs, [min(g) for g in groups], [max(g) for g in groups], color=colour, alpha=0.18
                )
        panel.set_title(metric_name(metric))
        panel.set_xlabel(axis)
        panel.set_ylim(bottom=0)
        if _is_log(data.numbers(axis)):
            panel.set_xscale("log", base=2)
            panel.set_xticks(data.numbers(axis), [f"{value:g}" for value in data.numbers(axis)])
            panel.minorticks_off()
    np.atleast_1d(panels)[0].legend(fontsize=8.5)
    band = " Bands: range over seeds." if len({row["seed"] for row in data.ran}) > 1 else ""
    return Figure("lines", f"Over {axis}", f"Mean of the scenarios of each policy.{band}", _png(figure))


def draw_heat_maps(data: SweepData) -> Figure | None:
    """Query: the first objective over two axes, a map a policy; other axes at their best."""
    metric, maximize = data.objectives[0] if data.objectives else ("output_tokens_per_s", True)
    across, down = _strongest_two(data, metric)
    columns, lines = data.numbers(across), data.numbers(down)
    grids: dict[str, Any] = {}
    for policy in data.policies[:MAX_PANELS]:
        grid = np.full((len(lines), len(columns)), np.nan)
        for row in data.ran:
            x, y, value = number(row, across), number(row, down), number(row, metric)
            if row["policy"] != policy or x is None or y is None or value is None:
                continue
            at = (lines.index(y), columns.index(x))
            better = np.fmax if maximize else np.fmin
            grid[at] = better(grid[at], value)
        if np.isfinite(grid).any():
            grids[policy] = grid
    if not grids:
        return None
    values = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low, high = float(values.min()), float(values.max())
    width = max(1.0 + 0.72 * len(columns), 3.0)
    figure, panels = _canvas(width * len(grids) + 1.0, max(1.3 + 0.5 * len(lines), 2.6), len(grids))
    colours = "viridis" if maximize else "viridis_r"
    for panel, (policy, grid) in zip(np.atleast_1d(panels), grids.items(), strict=True):
        image = panel.imshow(grid, origin="lower", aspect="auto", cmap=colours, vmin=low, vmax=high)
        panel.grid(False)
        panel.set_title(policy, color=policy_colour(policy))
        panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns], fontsize=8)
        panel.set_yticks(range(len(lines)), [f"{value:g}" for value in lines], fontsize=8)
        panel.set_xlabel(across)
        for (i, j), value in np.ndenumerate(grid):
            if np.isfinite(value):
                shade = (value - low) / (high - low) if high > low else 0.5
                dark = (shade if maximize else 1 - shade) < 0.6
                panel.text(
                    j,
                    i,
                    f"{value:.3g}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if dark else INK,
                )
    np.atleast_1d(panels)[0].set_ylabel(down)
    figure.colorbar(image, ax=list(np.atleast_1d(panels)), shrink=0.9, label=metric_name(metric))
    others = [axis for axis in data.axes if axis not in (across, down, "policy")]
    rest = f"; {', '.join(others)} at their best" if others else ""
    return Figure(
        "heat", f"{metric_name(metric)} over {across} and {down}", f"One map a policy{rest}.", _png(figure)
    )


def draw_parallel(data: SweepData) -> Figure | None:
    """Query: each scenario as a line through its axes and its metrics, those that none beats drawn strong."""
    names = [*data.numeric_axes, *_shown_metrics(data)]
    rows = [row for row in data.ran if all(number(row, name) is not None for name in _shown_metrics(data))]
    if len(rows) < 2:
        return None
    figure, axes = _canvas(1.75 * len(names) + 1.5, 4.2)
    spans = {name: _span(rows, name) for name in names}
    for row in sorted(rows, key=lambda one: bool(one["pareto"])):
        heights = [_height(number(row, name), *spans[name]) for name in names]
        strong = bool(row["pareto"])
        axes.plot(
            range(len(names)),
            heights,
            color=policy_colour(str(row["policy"])),
            alpha=0.95 if strong else 0.25,
            linewidth=1.9 if strong else 0.9,
        )
    for i, name in enumerate(names):
        low, high, _ = spans[name]
        axes.axvline(i, color=MUTED, linewidth=0.8)
        place = {"ha": "center", "fontsize": 8, "color": MUTED}
        axes.text(i, 1.03, f"{high:.4g}", **place)
        axes.text(i, -0.06, f"{low:.4g}", **place)
    settings = data.numeric_axes
    words = [name if name in settings else metric_name(name).replace(", ", ",\n") for name in names]
    axes.set_xticks(range(len(names)), words, fontsize=8)
    axes.tick_params(axis="x", pad=16)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(-0.2, len(names) - 0.8)
    ends = [(1.0 - 0.1 * i, policy, policy_colour(policy)) for i, policy in enumerate(data.policies)]
    direct_labels(axes, ends)
    return Figure(
        "parallel",
        "All axes at once",
        "One line a scenario, from its settings to its results. Strong lines: no scenario that meets the "
        "constraints beats them in every objective. A line starts where the policy has the setting.",
        _png(figure),
    )


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Query: the points that none beats in both coordinates, x ascending."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (-p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _shown_metrics(data: SweepData) -> list[str]:
    asked = [metric for metric, _ in data.objectives]
    return list(dict.fromkeys([*asked, *LINE_METRICS]))[: max(3, len(asked))]


def _grouped(data: SweepData, policy: str, axis: str, metric: str) -> tuple[list[float], list[list[float]]]:
    """Query: the axis's values, and for each the metric of a policy's rows."""
    groups: dict[float, list[float]] = {}
    for row in data.ran:
        x, value = number(row, axis), number(row, metric)
        if row["policy"] == policy and x is not None and value is not None:
            groups.setdefault(x, []).append(value)
    xs = sorted(groups)
    return xs, [groups[x] for x in xs]


def _strongest_two(data: SweepData, metric: str) -> tuple[str, str]:
    """Query: the two axes of numbers whose values move the metric most, on the mean over policies."""

    def effect(axis: str) -> float:
        total = 0.0
        for policy in data.policies:
            _, groups = _grouped(data, policy, axis, metric)
            means = [sum(group) / len(group) for group in groups]
            total += (max(means) - min(means)) if means else 0.0
        return total

    ranked = sorted(data.numeric_axes, key=lambda axis: -effect(axis))
    return ranked[0], ranked[1]


def _span(rows: Sequence[Row], name: str) -> tuple[float, float, bool]:
    values = [value for row in rows if (value := number(row, name)) is not None]
    low, high = min(values), max(values)
    return low, high, _is_log(values)


def _height(value: float | None, low: float, high: float, log: bool) -> float:
    if value is None:
        return float("nan")
    if high <= low:
        return 0.5
    if log:
        return float(np.log(value / low) / np.log(high / low))
    return (value - low) / (high - low)


def _is_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= 8


def _canvas(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(1, panels, figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
    return buffer.getvalue()
