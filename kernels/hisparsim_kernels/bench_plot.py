"""Draw benchmark rows: one bar a case and implementation, on a logarithmic time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hisparsim_kernels.bench import BenchRow
from hisparsim_kernels.errors import BenchFileError

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"triton": "#2a6f97", "torch": "#e07a5f", "reference": "#8d99ae"}


def plot(rows: Sequence[BenchRow], path: Path) -> None:
    """Write the figure to `path` (PNG, SVG or PDF by its suffix). Raises `BenchFileError` for another
    suffix, and where there is nothing to draw."""
    if path.suffix not in SUFFIXES:
        raise BenchFileError(f"{path} ends in {path.suffix!r}; a figure ends in {', '.join(SUFFIXES)}")
    if not rows:
        raise BenchFileError("there are no rows to draw; measure some with `bench --out`")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.26 * len(rows)), layout="constrained")
    places = list(range(len(rows)))
    axes.barh(places, [row.time_us for row in rows], color=[COLOURS[row.implementation] for row in rows])
    axes.set_yticks(places, [f"{row.kernel}  {row.case}" for row in rows], fontsize=7)
    for place, row in zip(places, rows, strict=True):
        share = "" if row.share_of_roof is None else f", {row.share_of_roof:.0%} of {row.roof}"
        axes.text(row.time_us, place, f" {row.time_us:.1f} us{share}", va="center", fontsize=6)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set_xlabel("time of one launch, microseconds")
    used = dict.fromkeys(row.implementation for row in rows)
    axes.legend(handles=[Patch(color=COLOURS[name], label=name) for name in used], fontsize=7)
    axes.set_title(", ".join(dict.fromkeys(row.device for row in rows)))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
