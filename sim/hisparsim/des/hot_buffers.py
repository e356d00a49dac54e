"""Expected misses of a replica's hot buffers: the steady state, and what cold rows add to it.

A request's rows become cold all together when it first decodes with pages on the host, and page by page as
the pool takes its resident pages. How many misses are still to come is kept for each request with the context
at which that was so; they decay with the tokens that follow (:mod:`hisparsim.locality.refill`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.locality.profile import LocalityProfile
from hisparsim.locality.surface import Floats
from hisparsim.serving.plan import DecodeBatch

Counts = NDArray[np.int64]

_OUTSIDE, _SINCE, _FIRST, _LATER, _RATE = range(5)
_LEAST_ROWS = 1e-3
"""Fewer expected rows are none."""
_WHOLE_RATE = 1e12
"""All that is left is missed in the next step."""


class HotBuffers:
    """What the requests of one replica have in their hot buffers."""

    def __init__(self, profile: LocalityProfile, num_requests: int, *, starts_warm: bool) -> None:
        self.profile = profile
        self.starts_warm = starts_warm
        self._state: Floats = np.zeros((num_requests, 5))
        """Of each request: pages read from the host, context when the rest was counted, rows that the step at
        that context misses beyond the steady state, rows that later ones do, and how fast these decay."""

    def forget(self, request_id: int) -> None:
        """Change: the request's buffer was given back."""
        self._state[request_id] = 0.0

    def settle(self, decodes: DecodeBatch) -> Floats:
        """Change: note what pages a batch reads from the host; returns its requests' states, [n, 5]."""
        ids = np.array(decodes.request_ids, np.int64)
        state = self._state[ids]
        outside = decodes.pages - decodes.resident_pages
        known = state[:, _OUTSIDE]
        if np.array_equal(outside, known):
            return state
        # Where nothing is resident, a page more is one that was just written, row by row into the buffer.
        cold = (outside > known) & ((decodes.resident_pages > 0) | (known == 0.0))
        if cold.any():
            state[cold] = self._with_cold_pages(decodes, cold, state[cold], outside[cold])
        state[:, _OUTSIDE] = outside
        self._state[ids] = state
        return state

    def _with_cold_pages(
        self, decodes: DecodeBatch, cold: NDArray[np.bool_], state: Floats, outside: Counts
    ) -> Floats:
        """Query: the states of the requests that read more pages from the host than before."""
        context, pages = decodes.context_tokens[cold], decodes.pages[cold]
        more = outside - state[:, _OUTSIDE].astype(np.int64)
        warm = self.starts_warm
        resident = decodes.resident_pages[cold]
        added = self.profile.refill(context, resident, pages, more, decodes.hot_rows, starts_warm=warm)
        passed = context - state[:, _SINCE]
        left, next_left, after_left = (_left(state, passed + tokens) for tokens in (0.0, 1.0, 2.0))
        first = left - next_left + added.first_rows
        later = next_left + added.later_rows
        second = np.minimum(next_left - after_left + added.second_rows, later)
        rate = np.where(second < later, second / np.maximum(later - second, 1e-12), _WHOLE_RATE)
        return np.stack([outside, context, first, later, rate], axis=1)

    def missed_millirows(self, decodes: DecodeBatch, context_tokens: Counts, looked_up: Counts) -> Counts:
        """Change: [k, n] thousandths of a row of one layer that k steps of a batch miss, the first one now.

        Args:
            context_tokens: [k, n] of each step.
            looked_up: [k, n] thousandths of a row that are not resident: no step misses more.
        """
        shape = context_tokens.shape
        resident, pages = (
            np.broadcast_to(counts, shape).ravel() for counts in (decodes.resident_pages, decodes.pages)
        )
        queries = decodes.query_tokens
        steady = self.profile.missed_millirows(
            context_tokens.ravel(), resident, pages, decodes.hot_rows, queries
        ).reshape(shape)
        state = self.settle(decodes)
        passed = context_tokens - state[:, _SINCE]
        left = _left(state, passed)
        if left[0].max() < _LEAST_ROWS:
            return steady
        extra = left - _left(state, passed + queries)
        extra[extra < _LEAST_ROWS] = 0.0
        missed: Counts = steady + np.rint(extra * 1000.0).astype(np.int64)
        most: Counts = np.maximum(looked_up, steady)
        return np.minimum(missed, most, out=most)


def _left(state: Floats, passed: Floats) -> Floats:
    """Query: rows still to be missed beyond the steady state, `passed` tokens after they were counted."""
    later = state[:, _LATER] / (1.0 + state[:, _RATE] * np.maximum(passed - 1.0, 0.0))
    return np.asarray(np.where(passed < 1.0, state[:, _FIRST] + state[:, _LATER], later))
