"""The capacity figure: requests that fit by context length, and the prompt lengths that never offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#6b7280", "#2563eb", "#d97706")
BAND_COLOUR = "#dc2626"


def draw_capacity(
    path: Path,
    *,
    context_tokens: Sequence[int],
    requests: Mapping[str, Sequence[int]],
    dead_bands: Sequence[tuple[int, int, int]] = (),
    title: str,
    note: str = "",
) -> None:
    """Change: write the figure to `path`, in the format of its suffix.

    `requests` maps a label to one count for each context length; up to three curves. Zero counts are left out
    (both axes are logarithmic). `dead_bands` are (first token, last token, requests that
    run there). Raises ValueError for an unknown suffix and OSError for a path that cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.0, 5.2), layout="constrained")
    try:
        for (label, counts), colour in zip(requests.items(), COLOURS, strict=False):
            points = [(x, y) for x, y in zip(context_tokens, counts, strict=True) if y > 0]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.step(xs, ys, where="post", label=label, color=colour, linewidth=1.8)
        for index, (first, last, count) in enumerate(dead_bands):
            band_label = "0.33 never starts to offload: runs these few" if index == 0 else None
            axes.axvspan(first, last, color=BAND_COLOUR, alpha=0.18, linewidth=0, label=band_label)
            axes.hlines(count, first, last, color=BAND_COLOUR, linewidth=2.5)
        _dress(axes, context_tokens, title, note)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def _dress(axes: Any, context_tokens: Sequence[int], title: str, note: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(min(context_tokens), max(context_tokens))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _tokens(tokens)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("context of each request, tokens")
    axes.set_ylabel("requests that fit at once")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="both", alpha=0.25, linewidth=0.6)
    axes.legend(loc="upper right", fontsize=9, framealpha=0.95)
    if note:
        axes.text(0.01, 0.02, note, transform=axes.transAxes, fontsize=8.5, color="#374151")


def _tokens(tokens: float) -> str:
    if tokens >= 2**20:
        return f"{tokens / 2**20:g}M"
    return f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"
