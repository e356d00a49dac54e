"""One engine replica: its core, its prices, its link, and the record of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import CostModel, StepCost
from hisparsim.des.links import HostLink
from hisparsim.des.transfers import TransferDesk
from hisparsim.locality.profile import LocalityProfile
from hisparsim.serving.core import ServingCore
from hisparsim.serving.plan import DecodeBatch, Idle, StepPlan


@dataclass(slots=True)
class RowCounts:
    """Expected rows by where selections fell, in thousandths of a row of one layer, summed over steps."""

    missed: int = 0
    looked_up: int = 0
    """Rows not readable on the GPU otherwise: hits and misses of the hot buffers."""
    selected: int = 0


@dataclass(slots=True)
class Snapshot:
    """The state after a plan was made, taken for its step's record."""

    running: int
    waiting: int
    num_full: int
    num_mixed: int
    num_none: int
    free: int
    index: int
    pinned: int
    released: int
    hot: int
    other: int
    host: int
    preemptions: int
    blocked_by: str | None
    waited: bool


@dataclass(slots=True)
class Replica:
    """A serving core with everything that gives its decisions a duration."""

    core: ServingCore
    cost: CostModel
    profile: LocalityProfile
    top_k: int
    link: HostLink
    desk: TransferDesk
    front_end_free_ns: int = 0
    next_plan: StepPlan | None = None
    next_snapshot: Snapshot | None = None
    rows: RowCounts = field(default_factory=RowCounts)
    alive_tokens: int = 0

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
        core = self.core
        census = core.policy.census(core.running)
        return Snapshot(
            len(core.running),
            len(core.waiting),
            census.num_full,
            census.num_mixed,
            census.num_none,
            census.free,
            census.index,
            census.resident_pinned,
            census.resident_released,
            census.hot,
            census.orphans,
            census.host_used,
            core.num_preemptions,
            core.notes.blocked_by,
            core.notes.waited,
        )

    def missed_millirows(self, decodes: DecodeBatch) -> int:
        """Expected rows missed in one layer by a decode batch, in thousandths; counts where rows fell."""
        if not decodes.request_ids:
            return 0
        context = decodes.context_tokens
        selected = np.minimum(context, self.top_k) * (1000 * decodes.query_tokens)
        total = int(selected.sum())
        self.rows.selected += total
        absent = decodes.pages - decodes.resident_pages
        if not decodes.hot_rows or not absent.any():
            return 0
        looked_up = int((selected * absent // decodes.pages).sum())
        missed = int(
            self.profile.missed_millirows(
                context, decodes.resident_pages, decodes.pages, decodes.hot_rows, decodes.query_tokens
            ).sum()
        )
        self.rows.looked_up += max(looked_up, missed)
        self.rows.missed += missed
        return missed

    def load(self, plan: StepPlan) -> StepLoad:
        """The load of a plan, misses included; counts rows."""
        return StepLoad.of(
            plan,
            top_k=self.top_k,
            resolve=self.core.policy.uses_groups,
            missed_millirows=self.missed_millirows(plan.decodes),
        )

    def price(self, load: StepLoad) -> StepCost:
        """What a step costs that starts now. Changes nothing."""
        return self.cost.price(load, self.link.background())
