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
_SHARE_OF_COUNT = 64
"""Lost pages are counted when they are more than this part of those that are read from the host: a pool under
pressure takes a page of somebody at every step, and one of a thousand moves nothing."""
_WHOLE_RATE = 1e12
"""All that is left is missed in the next step."""


class HotBuffers:
    """What the requests of one replica have in their hot buffers."""

    def __init__(self, profile: LocalityProfile, num_requests: int, *, starts_warm: bool) -> None:
        self.profile = profile
        self.starts_warm = starts_warm
        self._state: Floats = np.zeros((5, num_requests))
        """[5, requests]: pages read from the host, context when the rest was counted, rows that the step at
        that context misses beyond the steady state, rows that later ones do, and how fast these decay."""

    def forget(self, request_id: int) -> None:
        """Change: the request's buffer was given back."""
        self._state[:, request_id] = 0.0

    def settle(self, decodes: DecodeBatch) -> Floats:
        """Change: note what pages a batch reads from the host; returns its requests' states, [5, n]."""
        ids = np.array(decodes.request_ids, np.int64)
        state: Floats = self._state.take(ids, axis=1)
        outside = decodes.pages - decodes.resident_pages
        more = outside - state[_OUTSIDE]
        due = more * _SHARE_OF_COUNT > outside
        if np.count_nonzero(due):
            # Where nothing is resident, a page more is one that was just written, row by row into the buffer.
            cold = np.flatnonzero(due & ((decodes.resident_pages > 0) | (state[_OUTSIDE] == 0.0)))
            if len(cold):
                self._add_cold_pages(decodes, cold, more, state)
            state[_OUTSIDE, due] = outside[due]
            self._state[:, ids] = state
        return state

    def _add_cold_pages(self, decodes: DecodeBatch, cold: Counts, more: Floats, state: Floats) -> None:
        """Change: the states of the requests (``cold``, places in the batch) that lost pages to the host."""
        context = decodes.context_tokens[cold]
        added = self.profile.refill(
            context, decodes.resident_pages[cold], decodes.pages[cold], more[cold], decodes.hot_rows,
            starts_warm=self.starts_warm,
        )  # fmt: skip
        before = state[:, cold]
        passed = context - before[_SINCE]
        next_left = _later(before, passed + 1.0)
        due = np.where(passed < 1.0, before[_FIRST] + before[_LATER], _later(before, passed)) - next_left
        later = next_left + added.later_rows
        second = np.minimum(next_left - _later(before, passed + 2.0) + added.second_rows, later)
        rate = second / np.maximum(later - second, second / _WHOLE_RATE + 1e-300)
        state[_SINCE:, cold] = context, due + added.first_rows, later, rate

    def missed_millirows(self, decodes: DecodeBatch, context_tokens: Counts, looked_up: Counts) -> Counts:
        """Change: [k, n] thousandths of a row of one layer that k steps of a batch miss, the first one now.

        Args:
            context_tokens: [k, n] of each step.
            looked_up: [k, n] thousandths of a row that are not resident: no step misses more.
        """
        num_steps, queries = len(context_tokens), decodes.query_tokens
        resident, pages = decodes.resident_pages, decodes.pages
        if num_steps > 1:
            resident, pages = np.tile(resident, num_steps), np.tile(pages, num_steps)
        steady = self.profile.missed_millirows(
            context_tokens.ravel(), resident, pages, decodes.hot_rows, queries
        ).reshape(context_tokens.shape)
        state = self.settle(decodes)
        if not np.count_nonzero(state[_LATER]) and not np.count_nonzero(state[_FIRST]):
            return steady
        passed = context_tokens - state[_SINCE]
        extra = _later(state, passed) - _later(state, passed + queries) + state[_FIRST] * (passed < 1.0)
        missed: Counts = steady + np.rint(extra * 1000.0).astype(np.int64)
        most: Counts = np.maximum(looked_up, steady)
        return np.minimum(missed, most, out=most)


def _later(state: Floats, passed: Floats) -> Floats:
    """Query: rows that later steps still miss beyond the steady state, `passed` tokens after the count."""
    left: Floats = state[_LATER] / (1.0 + state[_RATE] * np.maximum(passed - 1.0, 0.0))
    return left
