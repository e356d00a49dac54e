"""The miss curve: the share of selected rows that an LRU hot buffer misses, by its size and the context.

Tabulated by b = hot rows / top_k and by context / top_k. A layer's selection depends on both only through
these ratios: scores are exchangeable and the threshold is a quantile, so a model with another top_k is the
same curve with less averaging (checked for top_k 128 against exact LRU in the tests).

Between table points: log-log in the buffer, linear in the logarithm of the context. Both are done once, into
a fine grid; look-ups are bilinear. Past the last buffer of a row the curve falls linearly to 0 where the
buffer holds the whole context; under b = 1 (no engine allows it) it rises linearly to 1 at b = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparsim.locality.surface import BUFFERS, CONTEXTS, Floats, Surface


class CurveTableError(ValueError):
    """A miss table that is no table, or whose misses rise with the buffer."""


class MissCurve:
    """Miss share of one kind of layer."""

    def __init__(
        self, top_k: int, hot_rows: Sequence[int], contexts: Sequence[int], shares: Sequence[Sequence[float]]
    ) -> None:
        """`shares[i][j]` for `contexts[i]` and `hot_rows[j]`; a row may end early."""
        _check_table(top_k, hot_rows, contexts, shares)
        known = np.log2(np.asarray(contexts, dtype=np.float64) / top_k)
        columns = np.stack(
            [
                _row(BUFFERS, np.asarray(hot_rows[: len(row)]) / top_k, np.asarray(row), context / top_k)
                for row, context in zip(shares, contexts, strict=True)
            ]
        )
        wanted = np.log2(CONTEXTS)
        at = np.clip(np.searchsorted(known, wanted, side="right") - 1, 0, len(known) - 2)
        part = ((wanted - known[at]) / (known[at + 1] - known[at]))[:, None]
        table = np.clip((1.0 - part) * columns[at] + part * columns[at + 1], 0.0, 1.0)
        self.surface = Surface(np.minimum.accumulate(table, axis=1))

    def __call__(self, buffer_ratio: Floats, context_ratio: Floats) -> Floats:
        """Query: [n] miss shares for [n] buffers and contexts, both in units of top_k."""
        share = self.surface(buffer_ratio, context_ratio)
        share = 1.0 - (1.0 - share) * np.minimum(buffer_ratio, 1.0)
        return np.asarray(share * (buffer_ratio < context_ratio))


def _check_table(
    top_k: int, hot_rows: Sequence[int], contexts: Sequence[int], shares: Sequence[Sequence[float]]
) -> None:
    if len(contexts) != len(shares) or len(contexts) < 2 or top_k < 1:
        raise CurveTableError(
            f"{len(shares)} rows of misses for {len(contexts)} contexts: at least 2, one each"
        )
    if np.any(np.diff(contexts) <= 0) or np.any(np.diff(hot_rows) <= 0):
        raise CurveTableError("contexts and hot_rows of a miss table must rise")
    for context, row in zip(contexts, shares, strict=True):
        if not 2 <= len(row) <= len(hot_rows):
            raise CurveTableError(f"context {context}: {len(row)} misses for {len(hot_rows)} buffers")
        if np.any(np.asarray(row) <= 0) or np.any(np.diff(row) > 0) or row[0] > 1:
            raise CurveTableError(f"context {context}: misses must fall with the buffer, within 0..1")


def _row(buffers: Floats, known: Floats, shares: Floats, whole: float) -> Floats:
    """Query: the shares of one context at all buffers: log-log inside, then linearly to 0 at the context."""
    inside = np.exp(np.interp(np.log(buffers), np.log(known), np.log(shares)))
    last = known[-1]
    left = max(whole - last, 1e-9)
    beyond = shares[-1] * np.clip((whole - buffers) / left, 0.0, 1.0)
    return np.asarray(np.where(buffers > last, beyond, inside))
