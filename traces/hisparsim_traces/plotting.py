"""Figures of a trace: lengths, load over time, reuse by cache size. Drawing only; the numbers come from
elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .reuse import stack_distances
from .trace import Trace


def plot_trace(trace: Trace, folder: Path) -> list[Path]:
    """Write traces-NAME-lengths.png, -load.png and, with block ids, -reuse.png; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    share = (np.arange(trace.num_requests) + 1) / trace.num_requests
    for label, values in (
        ("prompt", trace.input_tokens),
        ("output", trace.output_tokens),
        ("prompt + output", trace.input_tokens + trace.output_tokens),
    ):
        axes.step(np.sort(values), share, where="post", label=label)
    axes.set(
        xscale="log", xlabel="tokens", ylabel="share of requests at or below", title=f"{trace.name}: lengths"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    written.append(_save(figure, folder / f"traces-{trace.name}-lengths.png"))

    known = np.sort(trace.arrival_s[~np.isnan(trace.arrival_s)])
    if len(known) and known[-1] > 0:
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        edges = np.linspace(0.0, known[-1], 101)
        counts, _ = np.histogram(known, edges)
        axes.stairs(counts / (edges[1] - edges[0]), edges, fill=True, alpha=0.6)
        axes.set(
            xlabel="seconds from the first arrival", ylabel="requests per second", title=f"{trace.name}: load"
        )
        axes.grid(alpha=0.3)
        written.append(_save(figure, folder / f"traces-{trace.name}-load.png"))

    if trace.block_tokens is not None and len(trace.block_ids):
        stack = stack_distances(trace)
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        sizes = np.unique(np.geomspace(1, max(stack.num_distinct, 2), 200).astype(np.int64))
        axes.plot(sizes * trace.block_tokens, [stack.hit_share(int(size)) for size in sizes])
        axes.axhline(len(stack.distances) / stack.num_accesses, linestyle=":", label="infinite cache")
        axes.set(
            xscale="log",
            xlabel="LRU prefix cache, tokens",
            ylabel="share of prompt blocks found",
            title=f"{trace.name}: reuse by cache size",
            ylim=(0, None),
        )
        axes.grid(alpha=0.3)
        axes.legend()
        written.append(_save(figure, folder / f"traces-{trace.name}-reuse.png"))
    return written


def _save(figure: object, path: Path) -> Path:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
