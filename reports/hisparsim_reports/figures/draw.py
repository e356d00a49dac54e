"""All figures of a report, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from types import ModuleType

from hisparsim.results import RunResult

from . import over_time, pcie, pool, residency, ttft
from .style import DPI, house_style

FIGURES: dict[str, ModuleType] = {
    "ttft_cdf": ttft,
    "running_and_throughput": over_time,
    "residency_states": residency,
    "gpu_pool": pool,
    "pcie": pcie,
}
"""File stem -> the module that draws it: ``draw(runs)``, ``TITLE`` and ``CAPTION``."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, drawn: a PNG with its title and caption."""

    name: str
    title: str
    caption: str
    png: bytes


def draw_all(runs: Sequence[RunResult]) -> list[Figure]:
    """Query: the figures that the runs have data for; equal runs give equal bytes."""
    from matplotlib import pyplot as plt

    figures = []
    with house_style():
        for name, module in FIGURES.items():
            drawn = module.draw(runs)
            if drawn is None:
                continue
            buffer = BytesIO()
            drawn.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
            plt.close(drawn)
            figures.append(Figure(name, module.TITLE, module.CAPTION, buffer.getvalue()))
    return figures
