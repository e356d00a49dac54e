"""Hot buffers on a CPU: which row each hot slot holds, and exact LRU over the slots.

One state an index unit and request slot. The rules are those of :mod:`hisparsim_kernels.resolve`: hits keep
their order and end up last, misses take the slots that were used longest ago, in the order in which the
selection first names them. A request's state is emptied whenever its slot or its lease changes hands, so a
slot is known by the position that it holds alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
EMPTY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Where the rows of one selection lie in the hot buffer."""

    slots: Ints
    """[n] slot of each wanted position."""
    missed: NDArray[np.bool_]
    """[n] the slot's row must be fetched first."""


class _State:
    __slots__ = ("held", "order", "where")

    def __init__(self, hot_rows: int, max_tokens: int) -> None:
        self.held: Ints = np.full(hot_rows, EMPTY, np.int64)
        """[slots] position that the slot holds."""
        self.order: Ints = np.arange(hot_rows, dtype=np.int64)
        """Slots, used longest ago first."""
        self.where: NDArray[np.int32] = np.full(max_tokens, EMPTY, np.int32)
        """[positions] slot that holds it."""


class HotBuffers:
    """States of all units and request slots, made when they are first needed."""

    def __init__(self, hot_rows: int, max_tokens: int) -> None:
        self.hot_rows = hot_rows
        self.max_tokens = max_tokens
        self._states: dict[tuple[int, int], _State] = {}
        self._warm: dict[int, int] = {}

    def _state(self, unit: int, slot: int) -> _State:
        state = self._states.get((unit, slot))
        if state is None:
            state = _State(self.hot_rows, self.max_tokens)
            self._states[unit, slot] = state
            self._place(state, np.arange(self._warm.get(slot, 0), dtype=np.int64))
        return state

    def reset(self, slot: int, num_warm_rows: int = 0) -> None:
        """Change: empty a request slot, or let slot i hold position i for the first rows."""
        for key in [key for key in self._states if key[1] == slot]:
            del self._states[key]
        self._warm[slot] = num_warm_rows

    def place(self, unit: int, slot: int, positions: Ints) -> None:
        """Change: rows written straight into the slots of their positions."""
        self._place(self._state(unit, slot), positions)

    @staticmethod
    def _place(state: _State, positions: Ints) -> None:
        state.held[positions] = positions
        state.where[positions] = positions

    def look_up(self, unit: int, slot: int, wanted: Ints) -> Lookup:
        """Change: find a slot for each of ``wanted`` [n] distinct positions, in their order.

        Raises:
            ValueError: more are wanted than there are slots.
        """
        if len(wanted) > self.hot_rows:
            raise ValueError(
                f"{len(wanted)} rows wanted at once, the hot buffer has {self.hot_rows}: raise kv.hot_rows"
            )
        state = self._state(unit, slot)
        slots = state.where[wanted].astype(np.int64)
        missed = slots < 0
        is_hit = np.zeros(self.hot_rows, np.bool_)
        is_hit[slots[~missed]] = True
        hit_in_order = is_hit[state.order]
        evictable = state.order[~hit_in_order]
        num_missed = int(np.count_nonzero(missed))
        victims = evictable[:num_missed]
        if num_missed:
            gone = state.held[victims]
            state.where[gone[gone >= 0]] = EMPTY
            state.held[victims] = wanted[missed]
            state.where[wanted[missed]] = victims
            slots[missed] = victims
        state.order = np.concatenate([evictable[num_missed:], victims, state.order[hit_in_order]])
        return Lookup(slots, missed)
