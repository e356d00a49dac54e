"""Piecewise linear curves, looked up for one integer or for an array of them with the same result.

Run-time pricing uses only + - * /, minimum, maximum and these look-ups, all of which IEEE 754 rounds the same
way for a Python float and for a numpy float64. So k steps priced in one call equal k steps priced one by one,
bit for bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

Counts: TypeAlias = int | NDArray[np.int64]
"""A count: one for all steps, or [k] one a step."""
Quantity: TypeAlias = float | NDArray[np.float64]
"""A quantity in the same two forms."""

_DENSE = 1024
"""Every token count up to here is a point of `token_grid`: look-ups there are exact."""


@mypyc_attr(native_class=False)
class CurveError(ValueError):
    """Points that make no curve."""


def token_grid(max_tokens: int) -> NDArray[np.int64]:
    """Query: token counts at which work is tabulated: all up to 1024, then eight a factor of two."""
    points = list(range(_DENSE + 1))
    while points[-1] < max_tokens:
        points.append(points[-1] + max(1, points[-1] // 8))
    return np.asarray(points, dtype=np.int64)


class Curve:
    """y(x) through given points, linear between them and beyond the last; constant before the first.

    >>> Curve([0, 10, 20], [0.0, 5.0, 30.0])(15)
    17.5
    """

    def __init__(
        self, xs: Sequence[int] | NDArray[np.int64], ys: Sequence[float] | NDArray[np.float64]
    ) -> None:
        self.xs = np.asarray(xs, dtype=np.int64)
        self.ys = np.asarray(ys, dtype=np.float64)
        if self.xs.ndim != 1 or self.xs.shape != self.ys.shape or len(self.xs) < 2:
            raise CurveError(f"a curve needs two or more points, got x {self.xs.shape} and y {self.ys.shape}")
        if np.any(np.diff(self.xs) <= 0):
            raise CurveError("the x of a curve must rise")
        self.slopes = np.diff(self.ys) / np.diff(self.xs)
        self._xs: list[int] = self.xs.tolist()
        self._ys: list[float] = self.ys.tolist()
        self._slopes: list[float] = self.slopes.tolist()
        self._first, self._last = self._xs[0], len(self._xs) - 2

    @classmethod
    def of(cls, grid: NDArray[np.int64], function: Callable[[NDArray[np.float64]], Any]) -> Curve:
        """Query: the curve of a function evaluated on a grid."""
        return cls(grid, np.asarray(function(grid.astype(np.float64)), dtype=np.float64) + 0.0 * grid)

    def __call__(self, x: Counts) -> Any:
        """Query: y at `x`; a float for an int, float64 of the same shape for an array."""
        if isinstance(x, int):
            if x < self._first:
                x = self._first
            index = bisect_right(self._xs, x) - 1
            if index > self._last:
                index = self._last
            return self._ys[index] + self._slopes[index] * (x - self._xs[index])
        x = np.maximum(x, self._first)
        at = np.minimum(self.xs.searchsorted(x, side="right") - 1, self._last)
        return self.ys[at] + self.slopes[at] * (x - self.xs[at])

    def scaled(self, factor: float) -> Curve:
        """Query: the curve times a factor."""
        return Curve(self.xs, self.ys * factor)

    def __add__(self, other: Curve) -> Curve:
        """Query: the sum of two curves over the same grid."""
        return Curve(self.xs, self.ys + other.ys)


class CurveBank:
    """Several curves over one grid, looked up together for one integer.

    >>> CurveBank([Curve([0, 10], [0.0, 5.0]), Curve([0, 10], [1.0, 2.0])]).at(4)
    [2.0, 1.4]
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        xs = curves[0].xs
        if any(not np.array_equal(curve.xs, xs) for curve in curves):
            raise CurveError("the curves of a bank must share their x")
        self._xs: list[int] = xs.tolist()
        self._last = len(self._xs) - 2
        values = np.stack([curve.ys[:-1] for curve in curves], axis=1).tolist()
        slopes = np.stack([curve.slopes for curve in curves], axis=1).tolist()
        self._rows = [
            tuple(zip(value, slope, strict=True)) for value, slope in zip(values, slopes, strict=True)
        ]

    def at(self, x: int) -> list[float]:
        """Query: the y of every curve at `x`, each exactly what the curve itself gives."""
        index = bisect_right(self._xs, x) - 1
        if index > self._last:
            index = self._last
        beyond = x - self._xs[index]
        return [y + slope * beyond for y, slope in self._rows[index]]


def total(counts: Collection[Counts]) -> Counts:
    """Query: the sum of counts, the plain ones first: an array is added once and not again and again."""
    arrays = [count for count in counts if isinstance(count, np.ndarray)]
    return sum(arrays, sum([count for count in counts if not isinstance(count, np.ndarray)]))


def largest(a: Any, b: Any) -> Any:
    """Query: the greater of two counts or quantities, element by element where one is an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a >= b else b


def least(a: Any, b: Any) -> Any:
    """Query: the smaller of two counts or quantities, element by element where one is an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return a if a <= b else b


def either(condition: Any, yes: float, no: float) -> Any:
    """Query: `yes` where the condition (a count: not 0) holds, else `no`, element by element for an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition != 0, yes, no)
    return yes if condition else no


def whole_ns(quantity: Any) -> Any:
    """Query: nanoseconds as an int or int64 array, halves to even in both."""
    if isinstance(quantity, np.ndarray):
        return np.rint(quantity).astype(np.int64)
    return round(quantity)
