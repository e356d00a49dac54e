"""Resolve and gather against a sequential LRU model, over thousands of random request steps, exactly.

The world below is the ledger of a server in miniature: requests join and leave, their slots are used again,
pages lose and regain their resident copy, host blocks are recycled by other pages and have rows rewritten.
Every step drives the kernels and the plain-Python model with the same inputs and compares every output, the
order of slots, and the bytes of every hot row. All choices come from one seeded generator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_kernels import residency_check
from hisparsim_kernels.configs import LaunchConfig
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.interpreter import permuted_programs
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references.gather import host_row, pool_row
from hisparsim_kernels.references.lru import HostRow, SequentialHotBuffer
from hisparsim_kernels.residency_check import check_residency
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch

POISON = -77


@dataclass(frozen=True)
class WorldShape:
    """Sizes of a world; small, and chosen so that nothing is a power of two that need not be."""

    k: int = 12
    query_len: int = 1
    hot_rows: int = 21
    page_rows: int = 8
    max_pages: int = 10
    num_requests: int = 5
    batch: int = 6
    num_host_blocks: int = 60
    group_layers: tuple[int, ...] = (2, 1)
    row_bytes: int = 16
    gpu_blocks: int = 6000
    block: int | None = 16
    """Block size of the kernels; None takes the shipped configuration."""


class World:
    """Tables, pools, states and models; `step` resolves and gathers one batch in one group and checks
    everything."""

    def __init__(self, shape: WorldShape, seed: int) -> None:
        s = self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.layout = PageLayout.of_groups(s.row_bytes, s.group_layers, page_rows=s.page_rows)
        self.pool = torch.full((s.gpu_blocks, self.layout.block_bytes), 0x7F, dtype=torch.uint8)
        self.host = torch.full((s.num_host_blocks, self.layout.host_block_bytes), 0x7E, dtype=torch.uint8)
        self.generations = HostGenerations.allocate(s.num_host_blocks, "cpu")
        groups, hot_pages = len(s.group_layers), -(-s.hot_rows // s.page_rows)
        self.states = HotStates.allocate(groups, s.num_requests, s.hot_rows, "cpu")
        self.host_table = torch.full((s.num_requests, s.max_pages), -1, dtype=torch.int32)
        self.tables = [
            ResidencyTables(
                resident_blocks=torch.full((s.num_requests, s.max_pages), -1, dtype=torch.int32),
                host_blocks=self.host_table,
                hot_blocks=torch.full((s.num_requests, hot_pages), -1, dtype=torch.int32),
                host_generations=self.generations.generations,
                rows_per_block=self.layout.rows_per_block,
                page_rows=s.page_rows,
            )
            for _ in range(groups)
        ]
        self.scratch = ResolveScratch.allocate(
            s.batch, s.query_len, s.k, s.hot_rows, s.max_pages * s.page_rows, "cpu"
        )
        for tensor in vars(self.scratch).values():  # whatever was in it must not matter
            tensor.random_(-(2**15), 2**15 - 1, generator=torch.Generator().manual_seed(seed))
        self.plan = ResolvePlan.allocate(s.batch, s.query_len, s.k, "cpu")
        self.models = [
            [SequentialHotBuffer(s.hot_rows) for _ in range(s.num_requests)] for _ in range(groups)
        ]
        self.lengths = np.zeros(s.num_requests, dtype=np.int64)
        self.free_host = [int(block) for block in self.rng.permutation(s.num_host_blocks)]
        self.next_gpu_block = 0
        self.num_hits = self.num_misses = self.num_request_steps = 0

    def gpu_block(self) -> int:
        self.next_gpu_block = (self.next_gpu_block + 1) % self.shape.gpu_blocks
        return self.next_gpu_block

    def write_host(self, blocks: list[int]) -> None:
        """New contents of host blocks, after which no older copy of their rows may be used."""
        for block in blocks:
            fresh = self.rng.integers(0, 256, self.layout.host_block_bytes, dtype=np.uint8)
            self.host[block] = torch.from_numpy(fresh)
        renew_host_blocks(self.generations, torch.tensor([*blocks, -1], dtype=torch.int32))

    def join(self, request: int, num_pages: int, leased: bool) -> None:
        """A request takes the slot: some pages resident, most on the host, a few nowhere."""
        reset_requests(self.states, torch.tensor([request, -1], dtype=torch.int32))
        for group in self.models:
            group[request].reset()
        fresh = []
        for page in range(num_pages):
            place = self.rng.random()
            for tables in self.tables:
                tables.resident_blocks[request, page] = self.gpu_block() if place < 0.3 else -1
            if 0.1 < place < 0.95 and self.free_host:
                fresh.append(self.free_host.pop())
                self.host_table[request, page] = fresh[-1]
        self.write_host(fresh)
        for tables in self.tables:
            for page in range(tables.hot_blocks.shape[1]):
                tables.hot_blocks[request, page] = self.gpu_block() if leased else -1
        self.lengths[request] = num_pages * self.shape.page_rows - self.rng.integers(0, self.shape.page_rows)

    def leave(self, request: int) -> None:
        """The request's host blocks become free for others."""
        self.free_host = [int(b) for b in self.host_table[request] if b >= 0] + self.free_host
        self.host_table[request] = -1
        for tables in self.tables:
            tables.resident_blocks[request], tables.hot_blocks[request] = -1, -1
        self.lengths[request] = 0

    def disturb(self, request: int) -> None:
        """A page loses or regains its resident copy, moves to another host block, or has rows rewritten."""
        page, event = int(self.rng.integers(0, self.shape.max_pages)), self.rng.random()
        block = int(self.host_table[request, page])
        if event < 0.55:
            for tables in self.tables:
                tables.resident_blocks[request, page] = -1 if event < 0.35 else self.gpu_block()
        elif event < 0.75 and self.free_host:
            if block >= 0:
                self.free_host.append(block)
            taken = self.free_host.pop(int(self.rng.integers(0, len(self.free_host))))
            self.host_table[request, page] = taken
            self.write_host([taken])
        elif event < 0.9 and block >= 0:
            self.write_host([block])
        elif block >= 0:
            self.host_table[request, page] = -1
            self.free_host.append(block)

    def evolve(self) -> None:
        """Requests join and leave, pages move."""
        for request in range(self.shape.num_requests):
            if self.lengths[request] == 0:
                if self.rng.random() < 0.4:
                    pages = int(self.rng.integers(1, self.shape.max_pages + 1))
                    self.join(request, pages, leased=self.rng.random() < 0.9)
            elif self.rng.random() < 0.03:
                self.leave(request)
            elif self.rng.random() < 0.25:
                self.disturb(request)

    def select(self, request: int) -> list[int]:
        """Distinct positions of one query row, drawn with recency; holes, a position past the end, then
        -1."""
        k, length = self.shape.k, int(self.lengths[request])
        count = min(int(self.rng.integers(0, k + 1)) if self.rng.random() < 0.3 else k, length)
        weights = np.exp(np.arange(length) / max(length / 3, 1))
        chosen = (
            self.rng.choice(length, size=count, replace=False, p=weights / weights.sum()) if count else []
        )
        row = [int(position) for position in chosen]
        if len(row) > 2 and self.rng.random() < 0.2:
            row[1] = -1
        if row and self.rng.random() < 0.1:
            row[-1] = length + int(self.rng.integers(0, 3))
        return row + [-1] * (k - len(row))

    def expect(self, group: int, request: int, selections: list[list[int]]) -> dict[str, list]:
        """What the sequential model answers for one batch entry."""
        s, tables = self.shape, self.tables[group]
        resident: dict[int, int] = {}
        wanted: dict[int, HostRow] = {}
        missing: set[int] = set()
        for position in (p for row in selections for p in row if 0 <= p < self.lengths[request]):
            page, row = divmod(position, s.page_rows)
            block, host = int(tables.resident_blocks[request, page]), int(self.host_table[request, page])
            if block >= 0:
                resident[position] = block * tables.rows_per_block + row
            elif host >= 0 and tables.hot_blocks[request, 0] >= 0:
                wanted[position] = HostRow(host, row, int(self.generations.generations[host]))
            else:
                missing.add(position)
        step = self.models[group][request].step(list(wanted.values()))

        def flat(slot: int) -> int:
            return (
                int(tables.hot_blocks[request, slot // s.page_rows]) * tables.rows_per_block
                + slot % s.page_rows
            )

        hot = {position: flat(step.slots[row]) for position, row in wanted.items()}
        places = resident | hot
        rows = [[places.get(position, -1) for position in line] for line in selections]
        return {
            "rows": rows,
            "extents": [max((i + 1 for i, row in enumerate(line) if row >= 0), default=0) for line in rows],
            "misses": [
                (miss.row.block * s.page_rows + miss.row.row, flat(miss.slot)) for miss in step.misses
            ],
            "stats": [len(resident), step.num_hits, len(step.misses), len(missing)],
            "copies": [(wanted[p].block * s.page_rows + wanted[p].row, row) for p, row in hot.items()],
        }

    def step(self, group: int) -> None:
        """Resolve and gather one random batch in one index group; compare everything with the model."""
        s = self.shape
        live = self.rng.permutation(np.flatnonzero(self.lengths > 0))[: s.batch]
        slots = [int(request) for request in live] + [-1] * (s.batch - len(live))
        slots = [slots[i] for i in self.rng.permutation(s.batch)]  # padding anywhere
        rows = [[self.select(r) if r >= 0 else [3] * s.k for _ in range(s.query_len)] for r in slots]
        lengths = [int(self.lengths[r]) if r >= 0 else 17 for r in slots]
        for tensor in vars(self.plan).values():
            tensor.fill_(POISON)
        plan = self.plan
        parts = [
            LaunchConfig(f"resolve_{part}", "test", 4, 1, {"BLOCK": s.block or 1})
            for part in ("mark", "walk", "place")
        ]
        resolve(
            torch.tensor(rows, dtype=torch.int32).view(s.batch * s.query_len, s.k),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(slots, dtype=torch.int32),
            self.tables[group], self.states.group(group), plan, self.scratch, query_len=s.query_len,
            configs=(parts[0], parts[1], parts[2]) if s.block else None,
        )  # fmt: skip
        gather_rows(
            self.host, self.pool, plan.miss_host_rows, plan.miss_hot_rows, plan.num_misses, self.layout,
            group=group,
            num_programs=1,
        )  # fmt: skip
        nothing = {
            "rows": [[-1] * s.k] * s.query_len, "extents": [0] * s.query_len, "misses": [], "stats": [0] * 4,
            "copies": [],
        }  # fmt: skip
        wanted = [self.expect(group, r, rows[i]) if r >= 0 else nothing for i, r in enumerate(slots)]
        assert plan.rows.view(s.batch, s.query_len, s.k).tolist() == [w["rows"] for w in wanted]
        assert plan.extents.view(s.batch, s.query_len).tolist() == [w["extents"] for w in wanted]
        assert plan.stats.tolist() == [w["stats"] for w in wanted]
        count = int(plan.num_misses)
        got = zip(plan.miss_host_rows[:count].tolist(), plan.miss_hot_rows[:count].tolist(), strict=True)
        assert list(got) == [miss for w in wanted for miss in w["misses"]]
        assert plan.miss_host_rows[count:].eq(POISON).all()
        for request in range(s.num_requests):
            assert self.states.lru[group, request].tolist() == self.models[group][request].order
        for source, target in (copy for w in wanted for copy in w["copies"]):
            for layer in range(s.group_layers[group]):
                held = pool_row(self.pool, self.layout, target, layer)
                assert torch.equal(
                    held, host_row(self.host, self.layout, source, self.layout.first_layers[group] + layer)
                )
        self.num_hits += int(plan.stats[:, 1].sum())
        self.num_misses += count
        self.num_request_steps += sum(r >= 0 for r in slots)

    def run(self, num_steps: int) -> None:
        """Evolve and step, index groups taking turns."""
        for number in range(num_steps):
            self.evolve()
            self.step(number % len(self.shape.group_layers))


WORLDS = {
    "decode": (WorldShape(block=32), 200),
    "decode-again": (WorldShape(block=32), 200),
    "decode-in-small-blocks": (WorldShape(), 60),
    "hot-rows-equal-top-k": (WorldShape(hot_rows=12), 60),
    "verification-rows-4": (WorldShape(query_len=4, hot_rows=50, block=64), 110),
    "verification-rows-at-the-limit": (WorldShape(query_len=2, hot_rows=24), 50),
    "page-of-61-rows": (
        WorldShape(
            page_rows=61, max_pages=4, k=40, hot_rows=70, num_host_blocks=16, gpu_blocks=900, block=64
        ),
        40,
    ),
    "shipped-configuration": (
        WorldShape(block=None, k=100, hot_rows=300, max_pages=60, num_host_blocks=250),
        40,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_output_order_and_byte_equals_the_sequential_model(name: str) -> None:
    shape, num_steps = WORLDS[name]
    world = World(shape, seed=len(name))
    world.run(num_steps)
    assert world.num_hits > 3 * num_steps and world.num_misses > num_steps
    assert world.num_request_steps > 2 * num_steps


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    k=st.integers(1, 20),
    query_len=st.integers(1, 4),
    spare=st.integers(0, 25),
    page_rows=st.integers(1, 9),
)
def test_any_shape_of_world_agrees_with_the_model(
    seed: int, k: int, query_len: int, spare: int, page_rows: int
) -> None:
    hot_rows = k * query_len + spare
    World(WorldShape(k=k, query_len=query_len, hot_rows=hot_rows, page_rows=page_rows, batch=3), seed).run(8)


def test_the_order_of_programs_does_not_matter() -> None:
    for seed in range(3):
        with permuted_programs(seed):
            World(WorldShape(query_len=2, hot_rows=40), seed=11).run(12)


def test_speculation_of_three_tokens_at_true_size_agrees_with_the_model() -> None:
    """MTP3: 4 rows x 2048 in 10,240 hot rows under the shipped configuration."""
    shape = WorldShape(
        k=2048, query_len=4, hot_rows=10240, page_rows=64, max_pages=200, num_requests=2, batch=2,
        num_host_blocks=400, group_layers=(1,), gpu_blocks=1200, block=None,
    )  # fmt: skip
    world = World(shape, seed=4)
    world.join(0, 200, leased=True)
    world.join(1, 190, leased=True)
    for _ in range(3):
        world.step(0)
        world.disturb(0)
    assert world.num_hits > 5000 and world.num_misses > 5000


def test_the_check_for_a_gpu_passes_in_the_interpreter_and_says_what_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed, detail = check_residency(torch.device("cpu"))
    assert passed, detail
    monkeypatch.setattr(residency_check, "gather_rows", lambda *args, **kwargs: None)
    passed, detail = check_residency(torch.device("cpu"))
    assert not passed and "bytes of hot rows in layer 0" in detail
