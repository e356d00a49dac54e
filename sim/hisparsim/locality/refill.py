"""Misses beyond the steady state: rows that were never in the hot buffer miss at their first use.

Rows become cold when a buffer starts empty and when the pool takes a resident page. With mu(b) the steady
misses of a buffer of b selections, an empty buffer without bound has after a steps

    b(0) = 0,  b(1) = 1,  b(a + 1) = b(a) + mu(b(a))        selections in it, and misses mu(b(a)) in the next,

because what it holds then is what an LRU buffer of that size holds. One of B selections misses
max(mu(b(a)), mu(B)): so filling adds 1 - mu(B) in the first step, and afterwards, in all,

    F(B) = b(tau) - 1 - (tau - 1) mu(B)                     tau: when b(tau) = B, at most HORIZON steps

which comes as the cold rows are first selected: mu(1) - mu(B) in the second step, then less and less. A
:class:`Refill` lets it decay as 1 / (1 + rate x steps), which has that second step and that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hisparsim.locality.surface import BUFFERS, CONTEXTS, Floats, Surface

HORIZON_STEPS = 256
"""Filling beyond so many steps is steady state; few requests put out more tokens after losing a page."""
_LEAST_SHARE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Refill:
    """What cold rows of [n] requests miss beyond the steady state, in rows of one layer."""

    first_rows: Floats
    """[n] in the step that first reads them."""
    later_rows: Floats
    """[n] in all steps after it."""
    second_rows: Floats
    """[n] of those, in the first of them."""


class Filling:
    """F(B) and mu(1) of one curve."""

    def __init__(self, shares: Floats) -> None:
        """`shares` [len(CONTEXTS), len(BUFFERS)]: steady misses mu, the mean over a model's layers."""
        shares = np.maximum(shares, _LEAST_SHARE)
        steps = np.cumsum(2.0 * np.diff(BUFFERS) / (shares[:, 1:] + shares[:, :-1]), axis=1)
        steps = np.concatenate([np.zeros((len(shares), 1)), steps], axis=1)
        within = np.minimum(steps, HORIZON_STEPS)
        filled = np.stack([np.interp(part, row, BUFFERS) for part, row in zip(within, steps, strict=True)])
        self._later = Surface(np.maximum(filled - 1.0 - within * shares, 0.0))
        self._second = shares[:, 0]

    def refill(self, cold_rows: Floats, buffer: Floats, context: Floats, steady: Floats) -> Refill:
        """Query: what `cold_rows` [n], selected a step, add to the `steady` [n] misses of each row.

        `buffer` and `context` are in units of top_k.
        """
        later = self._later(buffer, context) * (context > 1.0)
        second = np.maximum(np.interp(context, CONTEXTS, self._second) - steady, 0.0)
        return Refill(cold_rows * (1.0 - steady), cold_rows * later, cold_rows * np.minimum(second, later))
