"""What the GPU pool held over time, by kind of block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.results import RunResult

from ..numbers import GIB, three_digits
from .multiples import Layer, draw_stacks

TITLE = "GPU pool of one GPU by kind of block"
CAPTION = (
    "From below: blocks that requests hold (indexer keys, pages held for good, hot buffers, others), then "
    "blocks that can be given away at any time but can still be read or hit, then empty ones."
)
_HELD = (
    ("index_blocks", "indexer", "#4D4D4D"),
    ("resident_pinned_blocks", "held pages", "#0072B2"),
    ("hot_blocks", "hot buffers", "#E69F00"),
    ("other_blocks", "other", "#CC79A7"),
)
_FREE = (
    ("resident_released_blocks", "released, still readable", "#8CC8EC"),
    ("cached_free_blocks", "free, prefix cached", "#B5DCC9"),
)
_EMPTY = ("free", "#E4E4E4")


def draw(runs: Sequence[RunResult]) -> Any:
    """Query: the figure, or None where no run recorded its pool."""
    return draw_stacks(runs, _layers, _note, "GiB")


def _layers(run: RunResult, line: Mapping[str, NDArray[np.float64]]) -> list[Layer]:
    if not any(column in line for column, _, _ in _HELD):
        return []
    gib = float(run.summary.get("gpu_block_bytes", GIB)) / GIB
    nothing = np.zeros(len(line["start_s"]))
    layers = [Layer(name, colour, line.get(column, nothing) * gib) for column, name, colour in _HELD]
    total = _num_blocks(run) * gib
    left = np.maximum(total - np.sum([layer.values for layer in layers], axis=0), 0)
    for column, name, colour in _FREE:
        values = np.minimum(line.get(column, nothing) * gib, left)
        layers.append(Layer(name, colour, values))
        left = left - values
    return [*layers, Layer(*_EMPTY, left)]


def _num_blocks(run: RunResult) -> int:
    """Query: blocks of the pool; where the run does not say, the most that were held and free at once."""
    if "num_gpu_blocks" in run.summary:
        return int(run.summary["num_gpu_blocks"])
    columns = [run.steps[name] for name, _, _ in _HELD if name in run.steps]
    if "free_blocks" in run.steps:
        columns.append(run.steps["free_blocks"])
    return int(np.sum(columns, axis=0).max(initial=0))


def _note(_: RunResult, layers: Sequence[Layer]) -> str:
    """Query: how much of the pool requests held on average."""
    total = float(np.sum([layer.values for layer in layers], axis=0).max())
    held = float(np.sum([layer.values for layer in layers[: len(_HELD)]], axis=0).mean())
    return f"held on average {three_digits(held)} of {three_digits(total)} GiB"
