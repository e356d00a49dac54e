"""A table over hot buffers and contexts, both in units of top_k, read between its points.

The grid is logarithmic in both. Look-ups are bilinear within a cell, and at the edge beyond it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_RATIO = 2048.0
"""Contexts of more than so many selections, and buffers too, take the values at it."""
_BUFFERS_PER_OCTAVE = 32
_CONTEXTS_PER_OCTAVE = 8


def _grid(per_octave: int) -> Floats:
    octaves = np.log2(MAX_RATIO)
    return np.asarray(np.exp2(np.linspace(0.0, octaves, int(octaves * per_octave) + 1)))


BUFFERS = _grid(_BUFFERS_PER_OCTAVE)
"""[columns] hot rows over top_k."""
CONTEXTS = _grid(_CONTEXTS_PER_OCTAVE)
"""[rows] context tokens over top_k."""
_BUFFER_WIDTHS = np.diff(BUFFERS)
_CONTEXT_WIDTHS = np.diff(CONTEXTS)


class Surface:
    """One value a buffer and context."""

    def __init__(self, table: Floats) -> None:
        """`table` is [len(CONTEXTS), len(BUFFERS)]."""
        self.table = table
        self._flat: Floats = np.ascontiguousarray(table).ravel()
        self._slopes: Floats = np.diff(self._flat, append=0.0)
        self._width = table.shape[1]

    def __call__(self, buffer_ratio: Floats, context_ratio: Floats) -> Floats:
        """Query: [n] values for [n] buffers and contexts; less than 1 reads as 1."""
        buffer = np.minimum(np.maximum(buffer_ratio, 1.0), MAX_RATIO)
        context = np.minimum(np.maximum(context_ratio, 1.0), MAX_RATIO)
        column, right = _cell(BUFFERS, _BUFFER_WIDTHS, buffer)
        row, below = _cell(CONTEXTS, _CONTEXT_WIDTHS, context)
        at = row * self._width + column
        flat, slopes = self._flat, self._slopes
        upper = flat[at] + slopes[at] * right
        at += self._width
        lower = flat[at] + slopes[at] * right
        return np.asarray(upper + (lower - upper) * below)


def _cell(grid: Floats, widths: Floats, values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Query: the grid cell of each value, and how far into it the value lies."""
    at = grid[:-1].searchsorted(values, side="right") - 1
    return at, (values - grid[at]) / widths[at]
