"""A hot buffer as plain Python: exact LRU over a list of slots, one request, one index group.

Written from the rules alone and sharing nothing with the kernels: rows are keyed by (host block, row,
generation), looked up in a dictionary, and the order is a list. It is the oracle of the residency tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostRow:
    """A row as the host holds it: block, row in the block, and the generation of the block."""

    block: int
    row: int
    generation: int


@dataclass(frozen=True)
class Miss:
    """A row to fetch and the slot that takes it."""

    row: HostRow
    slot: int


@dataclass(frozen=True)
class LruStep:
    """Outcome of one step: the slot of each distinct row needed, the misses in order, and the number of
    hits."""

    slots: dict[HostRow, int]
    misses: tuple[Miss, ...]
    num_hits: int


class SequentialHotBuffer:
    """Exact LRU over `hot_rows` slots; `order` is the eviction order, least recently used first."""

    def __init__(self, hot_rows: int) -> None:
        self.order = list(range(hot_rows))
        self.holds: list[HostRow | None] = [None] * hot_rows

    def reset(self) -> None:
        """Empty every slot and restore the initial order (the request slot changes hands)."""
        self.__init__(len(self.holds))  # type: ignore[misc]

    def step(self, needed: Sequence[HostRow]) -> LruStep:
        """Serve the rows of one step (the union of its query rows, in order of first occurrence) and reorder.

        Raises ValueError if the step needs more distinct rows than there are slots.
        """
        distinct = list(dict.fromkeys(needed))
        if len(distinct) > len(self.holds):
            raise ValueError(
                f"{len(distinct)} distinct rows needed, {len(self.holds)} hot rows; raise the hot rows"
            )
        wanted = set(distinct)
        hits = [slot for slot in self.order if self.holds[slot] in wanted]
        evictable = [slot for slot in self.order if self.holds[slot] not in wanted]
        slots = {row: slot for slot in hits if (row := self.holds[slot]) is not None}
        missing = [row for row in distinct if row not in slots]
        victims, untouched = evictable[: len(missing)], evictable[len(missing) :]
        misses = []
        for row, slot in zip(missing, victims, strict=True):
            self.holds[slot] = row
            slots[row] = slot
            misses.append(Miss(row, slot))
        self.order = untouched + victims + hits
        return LruStep(slots, tuple(misses), len(hits))
