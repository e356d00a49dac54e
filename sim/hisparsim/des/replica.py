"""One engine replica: its core, its prices, its link, and the record of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import CostModel, StepCost
from hisparsim.des.hot_buffers import HotBuffers
from hisparsim.des.links import Direction, HostLink
from hisparsim.des.recorder import StepEnd
from hisparsim.des.transfers import TransferDesk
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import DecodeBatch, Idle, StepPlan
from hisparsim.serving.policy import Census

Counts = NDArray[np.int64]


@dataclass(slots=True)
class RowCounts:
    """Expected rows by where selections fell, in thousandths of a row of one layer, summed over steps."""

    missed: int = 0
    looked_up: int = 0
    """Rows not readable on the GPU otherwise: hits and misses of the hot buffers."""
    selected: int = 0

    def add(self, rows: StretchRows, num_steps: int) -> None:
        """Count the first steps of a stretch."""
        self.selected += _sum_of_first(rows.selected, num_steps)
        self.looked_up += _sum_of_first(rows.looked_up, num_steps)
        self.missed += _sum_of_first(rows.missed, num_steps)


@dataclass(frozen=True, slots=True, eq=False)
class StretchRows:
    """As :class:`RowCounts`, [k] for each step of a stretch."""

    missed: Counts | int
    looked_up: Counts | int
    selected: Counts


@dataclass(slots=True)
class Snapshot:
    """The state after a plan was made, taken for its step's record."""

    state: tuple[int, ...]
    """The columns of its step from ``running`` to ``host_blocks_used``."""
    waiting: int
    preemptions: int
    blocked_by: str | None
    waited: bool


@dataclass(slots=True)
class Replica:
    """A serving core with everything that gives its decisions a duration."""

    core: ServingCore
    cost: CostModel
    hot: HotBuffers
    top_k: int
    link: HostLink
    desk: TransferDesk
    next_plan: StepPlan | None = None
    next_snapshot: Snapshot | None = None
    rows: RowCounts = field(default_factory=RowCounts)
    last_end: StepEnd = field(default_factory=StepEnd)
    alive_tokens: int = 0
    busy_until_ns: int = 0
    """When the step or stretch under way ends, or the last one ended."""
    h2d_bytes: int = 0
    """Read from the host within steps, by one GPU; flows are the desk's."""
    d2h_bytes: int = 0
    _moved: tuple[int, int] = (0, 0)

    def prepare(self) -> bool:
        """Plan the next step if none is prepared; returns whether one is."""
        if self.next_plan is None:
            plan = self.core.plan()
            if isinstance(plan, Idle):
                return False
            self.next_plan = plan
            self.next_snapshot = self.snapshot()
        return True

    def snapshot(self) -> Snapshot:
        """Counts right after a plan. Changes nothing."""
        return self.snapshot_of(self.core.policy.census(self.core.running))

    def snapshot_of(self, census: Census) -> Snapshot:
        """Counts with those of the policy's memory given. Changes nothing."""
        core = self.core
        waiting, notes = len(core.waiting), core.notes
        shared = max(-census.orphans, 0)  # indexer pages that several requests count and the pool holds once
        state = (
            len(core.running), waiting, census.num_full, census.num_mixed, census.num_none, census.free,
            census.index - shared, census.resident_pinned, census.resident_released, census.hot,
            census.orphans + shared, census.host_used,
        )  # fmt: skip
        return Snapshot(state, waiting, core.num_preemptions, notes.blocked_by, notes.waited)

    def _hot_rows(self, decodes: DecodeBatch, context: Counts) -> tuple[Counts, Counts]:
        """[k, n] thousandths of a row of one layer: looked up in a hot buffer, missed, in k steps."""
        selected = np.minimum(context, self.top_k) * (1000 * decodes.query_tokens)
        looked_up = selected * (decodes.pages - decodes.resident_pages) // np.maximum(decodes.pages, 1)
        missed = self.hot.missed_millirows(decodes, context, looked_up)
        return np.maximum(looked_up, missed), missed

    def load(self, plan: StepPlan) -> StepLoad:
        """The load of a plan, expected misses included; counts where its selections fall."""
        decodes = plan.decodes
        missed_millirows = 0
        if decodes.hot_rows and np.count_nonzero(decodes.resident_pages < decodes.pages):
            looked_up, missed = self._hot_rows(decodes, decodes.context_tokens[None, :])
            missed_millirows = int(missed.sum())
            self.rows.missed += missed_millirows
            self.rows.looked_up += int(looked_up.sum())
        load = StepLoad.of(
            plan,
            top_k=self.top_k,
            resolve=self.core.policy.uses_groups,
            missed_millirows=missed_millirows,
        )
        self.rows.selected += 1000 * int(load.selected_rows)
        return load

    def stretch_load(self, plan: StepPlan, num_steps: int) -> tuple[StepLoad, StretchRows]:
        """The load of so many quiet steps that start with a plan, and where their selections fall."""
        decodes: DecodeBatch = plan.decodes
        hot_requests = 0
        looked_up: Counts | int = 0
        missed: Counts | int = 0
        if decodes.hot_rows:
            hot_requests = int(np.count_nonzero(decodes.resident_pages < decodes.pages))
        if hot_requests:
            grown = decodes.context_tokens[None, :] + np.arange(num_steps, dtype=np.int64)[:, None]
            looked_up, missed = (rows.sum(axis=1) for rows in self._hot_rows(decodes, grown))
        load = StepLoad.stretch(
            decodes,
            num_steps,
            top_k=self.top_k,
            resolve=self.core.policy.uses_groups,
            graph_requests=plan.graph_bucket or 0,
            hot_requests=hot_requests,
            missed_millirows=missed,
            mirrored_tokens=plan.mirrored_tokens,
        )
        return load, StretchRows(missed, looked_up, 1000 * np.asarray(load.selected_rows))

    def moved_bytes(self) -> tuple[int, int]:
        """(to the GPU, to the host) bytes that flows moved since the last call."""
        before = self._moved
        if self.desk.num_started == 0:
            return before
        h2d, d2h = self.link.moved_bytes(Direction.H2D), self.link.moved_bytes(Direction.D2H)
        self._moved = (h2d, d2h)
        return h2d - before[0], d2h - before[1]

    def count_bytes(self, cost: StepCost, num_steps: int = 1) -> None:
        """Count what the first steps of a cost move themselves."""
        self.h2d_bytes += _sum_of_first(cost.h2d_bytes, num_steps)
        self.d2h_bytes += _sum_of_first(cost.d2h_bytes, num_steps)

    def total_bytes(self) -> tuple[int, int]:
        """(to the GPU, to the host) bytes of one GPU, steps and flows together. Changes nothing."""
        return self.h2d_bytes + self.desk.h2d_bytes, self.d2h_bytes + self.desk.d2h_bytes

    def price(self, load: StepLoad) -> StepCost:
        """What a step costs that starts now. Changes nothing."""
        return self.cost.price(load, self.link.background())


def _sum_of_first(counts: Counts | int, num_steps: int) -> int:
    if isinstance(counts, np.ndarray):
        return int(counts[:num_steps].sum())
    return int(counts) * num_steps
