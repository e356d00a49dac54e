"""How selections move: what a step shares with the one before, how long until a position returns, how
recent it is.

A stream is one request in one layer group; its records are taken in file order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import TraceError
from .topk import Selections
from .trace import Ints

RECENT_TOKENS = (1, 64, 512, 2048, 8192)
_MAX_DISTANCE = 1 << 16  # records; longer returns are counted together


@dataclass
class _Stream:
    """Per position: the record of the stream (from 0) that selected it last, -1 for never."""

    last: Ints = field(default_factory=lambda: np.full(1024, -1, np.int64))
    records: int = 0
    previous_count: int = 0


@dataclass
class TopkStatistics:
    """Collects figures over batches. Memory: 8 bytes a context position of each stream.

    Attributes:
        overlap: for each record but a stream's first, the share of it that the record before had selected
            too.
        returns: [_MAX_DISTANCE + 1] how often a position came back after so many records of its stream.
        cold: selections of a position that its stream had not selected before.
        recent: how many selections lie within the last so many tokens of the context.
    """

    overlap: list[float] = field(default_factory=list)
    returns: Ints = field(default_factory=lambda: np.zeros(_MAX_DISTANCE + 1, np.int64))
    cold: int = 0
    num_selected: int = 0
    num_records: int = 0
    recent: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RECENT_TOKENS, 0))
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict)

    def add(self, batch: Selections) -> None:
        """Take in a batch."""
        for record in range(len(batch)):
            self._add(
                (int(batch.request[record]), int(batch.group[record])),
                int(batch.context[record]),
                batch.selected(record),
            )

    def _add(self, key: tuple[int, int], context: int, chosen: Ints) -> None:
        stream = self._streams.setdefault(key, _Stream())
        if len(chosen) and int(chosen[-1]) >= len(stream.last):
            grown = np.full(max(2 * len(stream.last), int(chosen[-1]) + 1), -1, np.int64)
            grown[: len(stream.last)] = stream.last
            stream.last = grown
        last = stream.last[chosen]
        seen = last >= 0
        distance = stream.records - last[seen]
        self.returns += np.bincount(np.minimum(distance, _MAX_DISTANCE), minlength=_MAX_DISTANCE + 1)
        self.cold += int((~seen).sum())
        if stream.records and len(chosen):
            self.overlap.append(float((distance == 1).sum()) / len(chosen))
        for tokens in RECENT_TOKENS:
            self.recent[tokens] += int((chosen >= context - tokens).sum())
        stream.last[chosen] = stream.records
        stream.records += 1
        self.num_selected += len(chosen)
        self.num_records += 1

    def summary(self) -> dict[str, Any]:
        """Plain JSON values. Raises TraceError where nothing was taken in."""
        if not self.num_records:
            raise TraceError("no selection was recorded, so there is nothing to describe")
        overlap = np.array(self.overlap)
        back = np.cumsum(self.returns)
        total = max(self.num_selected, 1)
        return {
            "num_records": self.num_records,
            "num_streams": len(self._streams),
            "num_selected": self.num_selected,
            "step_overlap": None
            if not len(overlap)
            else {
                "mean": float(overlap.mean()),
                "p10": float(np.percentile(overlap, 10)),
                "p50": float(np.percentile(overlap, 50)),
                "p90": float(np.percentile(overlap, 90)),
            },
            "returned_within": {
                str(steps): float(back[steps]) / total for steps in (1, 2, 4, 8, 16, 64, 256)
            },
            "cold_share": self.cold / total,
            "recent_share": {str(tokens): count / total for tokens, count in self.recent.items()},
        }


def topk_summary(batches: Iterable[Selections]) -> dict[str, Any]:
    """The figures of a whole file: `topk_summary(TopkReader(path))`."""
    statistics = TopkStatistics()
    for batch in batches:
        statistics.add(batch)
    return statistics.summary()
