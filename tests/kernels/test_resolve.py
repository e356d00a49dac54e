"""Resolve, one rule or one known kind of bug at a time, on a request small enough to read."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hisparsim_kernels.errors import DeviceError, DtypeError, RangeError, ShapeError, StrideError
from hisparsim_kernels.hot_state import (
    HostGenerations,
    HotState,
    HotStates,
    renew_host_blocks,
    reset_requests,
)
from hisparsim_kernels.references.lru import HostRow, SequentialHotBuffer
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch

PAGE, PAGES, K, HOT, BLOCK_ROWS = 4, 6, 4, 8, 8
HOST_BLOCKS = 20


class Server:
    """Two requests of 24 tokens: pages 0-3 on the host, page 4 resident in GPU block 50, page 5 nowhere."""

    def __init__(self, batch: int = 1, query_len: int = 1) -> None:
        self.hosts = HostGenerations.allocate(HOST_BLOCKS, "cpu")
        self.states = HotStates.allocate(1, 2, HOT, "cpu")
        resident = torch.tensor([[-1, -1, -1, -1, 50, -1]] * 2, dtype=torch.int32)
        host = torch.tensor([[3, 7, 5, 9, -1, -1], [11, 12, 13, 14, -1, -1]], dtype=torch.int32)
        hot = torch.tensor([[60, 61], [70, 71]], dtype=torch.int32)
        self.tables = ResidencyTables(resident, host, hot, self.hosts.generations, BLOCK_ROWS, PAGE)
        self.query_len = query_len
        self.plan = ResolvePlan.allocate(batch, query_len, K, "cpu")
        self.scratch = ResolveScratch.allocate(batch, query_len, K, HOT, PAGE * PAGES, "cpu")
        self.poison()

    def poison(self) -> None:
        for buffers in (self.plan, self.scratch):
            for tensor in vars(buffers).values():
                tensor.fill_(-77)

    @property
    def state(self) -> HotState:
        return self.states.group(0)

    def resolve(
        self, *rows: list[int], slots: tuple[int, ...] = (0,), length: int = PAGE * PAGES
    ) -> ResolvePlan:
        selection = torch.tensor([row + [-1] * (K - len(row)) for row in rows], dtype=torch.int32)
        lengths = torch.full((len(slots),), length, dtype=torch.int32)
        resolve(
            selection, lengths, torch.tensor(slots, dtype=torch.int32), self.tables, self.state, self.plan,
            self.scratch, query_len=self.query_len,
        )  # fmt: skip
        return self.plan

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in vars(self.states).values()]

    def misses(self) -> list[tuple[int, int]]:
        count = int(self.plan.num_misses)
        return list(
            zip(
                self.plan.miss_host_rows[:count].tolist(),
                self.plan.miss_hot_rows[:count].tolist(),
                strict=True,
            )
        )


def test_each_place_is_found_and_the_rest_is_minus_one() -> None:
    server = Server()
    plan = server.resolve([1, 17, 22, 6])  # host block 3 row 1, resident, nowhere, host block 7 row 2
    assert plan.rows.tolist() == [[60 * 8 + 0, 50 * 8 + 1, -1, 60 * 8 + 1]]
    assert server.misses() == [(3 * 4 + 1, 60 * 8), (7 * 4 + 2, 60 * 8 + 1)]
    assert plan.extents.tolist() == [4]
    assert plan.stats.tolist() == [[1, 0, 2, 1]]


def test_order_becomes_untouched_then_fresh_misses_then_hits() -> None:
    server = Server()
    server.resolve([0, 1, 2, 3])
    assert server.state.lru[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    plan = server.resolve([2, 4, 0, 5])
    assert server.state.lru[0].tolist() == [6, 7, 1, 3, 4, 5, 0, 2]
    assert plan.stats.tolist() == [[0, 2, 2, 0]]


def test_hot_slots_past_the_first_page_use_the_second_leased_block() -> None:
    server = Server()
    server.resolve([0, 1, 2, 3])
    plan = server.resolve([4, 5, 6, 7])
    assert plan.rows.tolist() == [[61 * 8, 61 * 8 + 1, 61 * 8 + 2, 61 * 8 + 3]]


def test_no_two_selected_rows_share_a_slot_even_when_all_hot_rows_are_needed() -> None:
    server = Server(query_len=2)
    for rows in (
        ([0, 1, 2, 3], [4, 5, 6, 7]),
        ([8, 9, 3, 2], [15, 14, 13, 12]),
        ([12, 0, 15, 1], [9, 8, 7, 6]),
    ):
        plan = server.resolve(*rows)
        assert plan.rows.unique().numel() == 8
        assert sorted(server.state.lru[0].tolist()) == list(range(HOT))


def test_verification_rows_share_a_fetched_row_and_keep_first_occurrence_order() -> None:
    server = Server(query_len=2)
    plan = server.resolve([5, 1, 2], [1, 9, 5, 0])
    assert server.misses() == [(29, 480), (13, 481), (14, 482), (21, 483), (12, 488)]  # positions 5 1 2 9 0
    assert plan.rows.tolist() == [[480, 481, 482, -1], [481, 483, 480, 488]]
    assert plan.extents.tolist() == [3, 4]


def test_no_row_evicts_what_another_row_of_the_request_needs() -> None:
    server = Server(query_len=2)
    server.resolve([0, 1, 2, 3], [4, 5, 6, 7])  # all eight slots in use, slot 0 the oldest
    plan = server.resolve([8, 9, 10, 11], [0, 1, 2, 3])
    assert plan.stats.tolist() == [[0, 4, 4, 0]]
    assert plan.rows.unique().numel() == 8


def test_minus_one_in_the_middle_of_a_selection_reaches_no_table() -> None:
    server = Server()
    plan = server.resolve([-1, 3, -1, 0])
    assert plan.rows.tolist() == [[-1, 480, -1, 481]]
    assert plan.extents.tolist() == [4]
    assert plan.stats.tolist() == [[0, 0, 2, 0]]


@pytest.mark.parametrize("length", [0, 2])
def test_positions_past_the_length_count_as_none(length: int) -> None:
    server = Server()
    plan = server.resolve([0, 1, 2, 3], length=length)
    assert plan.stats.tolist() == [[0, 0, length, 0]]
    assert plan.rows[0, length:].eq(-1).all()


def test_padding_entries_get_every_output_and_leave_all_state_alone() -> None:
    server = Server(batch=3)
    before = server.snapshot()
    plan = server.resolve([0, 1, 2, 3], [0, 1], [5], slots=(-1, -1, -1))
    assert plan.rows.eq(-1).all() and plan.extents.eq(0).all() and plan.stats.eq(0).all()
    assert plan.num_misses.tolist() == [0]
    assert all(torch.equal(a, b) for a, b in zip(before, server.snapshot(), strict=True))


def test_a_short_selection_overwrites_the_whole_line_of_the_plan() -> None:
    server = Server(batch=2)
    server.resolve([0, 1, 2, 3], [0, 1, 2, 3], slots=(0, 1))
    plan = server.resolve([8], [], slots=(1, 0))
    assert plan.rows.tolist() == [[71 * 8, -1, -1, -1], [-1] * 4]
    assert plan.extents.tolist() == [1, 0]


def test_a_fully_resident_request_misses_nothing_and_its_order_stays() -> None:
    server = Server()
    server.resolve([0, 1, 2, 3])
    before = server.snapshot()
    plan = server.resolve([16, 17, 18, 19])
    assert plan.rows.tolist() == [[400, 401, 402, 403]]
    assert plan.num_misses.tolist() == [0]
    assert all(torch.equal(a, b) for a, b in zip(before, server.snapshot(), strict=True))


def test_a_request_without_a_lease_reads_nothing_from_the_host() -> None:
    server = Server()
    server.tables.hot_blocks[0] = -1
    plan = server.resolve([0, 16, 1])
    assert plan.rows.tolist() == [[-1, 400, -1, -1]]
    assert plan.stats.tolist() == [[1, 0, 0, 2]]


def test_a_slot_of_a_hot_page_that_is_not_leased_gives_no_row_and_no_target() -> None:
    server = Server()
    server.resolve([0, 1, 2, 3])
    server.tables.hot_blocks[0, 1] = -1  # slots 4 to 7
    plan = server.resolve([4, 0, 5])
    assert plan.rows.tolist() == [[-1, 60 * 8, -1, -1]]
    assert server.misses() == [(7 * 4, -1), (7 * 4 + 1, -1)]  # which the gather skips


def test_a_page_without_a_complete_host_copy_is_never_fetched() -> None:
    server = Server()
    server.tables.host_blocks[0, 1] = -1  # mirrored later: the ledger has not published it
    plan = server.resolve([4, 5, 0])
    assert plan.rows.tolist() == [[-1, -1, 480, -1]]
    server.tables.host_blocks[0, 1] = 7
    assert server.resolve([4, 5, 0]).stats.tolist() == [[0, 1, 2, 0]]


def test_a_row_rewritten_after_a_rejected_draft_is_fetched_again() -> None:
    server = Server()
    server.resolve([12, 0])
    assert server.resolve([12, 0]).stats.tolist() == [[0, 2, 0, 0]]
    renew_host_blocks(server.hosts, torch.tensor([9, -1], dtype=torch.int32))  # page 3 holds position 12
    assert server.resolve([12, 0]).stats.tolist() == [[0, 1, 1, 0]]


def test_a_recycled_host_block_is_no_hit_for_its_next_owner_or_its_last() -> None:
    server = Server()
    server.resolve([0, 1])
    server.tables.host_blocks[0, 0] = 19  # the page was written to another block
    renew_host_blocks(server.hosts, torch.tensor([19], dtype=torch.int32))
    assert server.resolve([0, 1]).stats.tolist() == [[0, 0, 2, 0]]
    server.tables.host_blocks[0, 0] = 3  # back in the first block, under a new generation
    renew_host_blocks(server.hosts, torch.tensor([3], dtype=torch.int32))
    assert server.resolve([0, 1]).stats.tolist() == [[0, 0, 2, 0]]


def test_a_reused_request_slot_starts_empty_in_every_group() -> None:
    states = HotStates.allocate(3, 4, HOT, "cpu")
    states.positions.fill_(5)
    states.generations.fill_(6)
    states.lru.copy_(torch.arange(HOT - 1, -1, -1))
    reset_requests(states, torch.tensor([2, -1], dtype=torch.int32))
    assert states.positions[:, 2].eq(-1).all() and states.positions[:, [0, 1, 3]].eq(5).all()
    assert states.lru[:, 2].tolist() == [list(range(HOT))] * 3
    assert states.lru[:, 0].tolist() == [list(range(HOT - 1, -1, -1))] * 3


def test_generations_are_never_given_out_twice() -> None:
    hosts = HostGenerations.allocate(HOST_BLOCKS, "cpu")
    seen = set(hosts.generations.tolist())
    for blocks in ([1, 5, -1, 19], [-1], [5, 1], list(range(20))):
        renew_host_blocks(hosts, torch.tensor(blocks, dtype=torch.int32))
        fresh = [int(hosts.generations[block]) for block in blocks if block >= 0]
        assert not seen & set(fresh) and len(set(fresh)) == len(fresh)
        seen |= set(fresh)


def test_a_stale_first_entry_map_is_not_believed() -> None:
    server = Server()
    for fill in (-(2**15), 0, 3, 2**15 - 1):
        server.scratch.first_entry.fill_(fill)
        plan = server.resolve([5, 6, 16, 7])
        assert plan.rows[0, 2] == 400 and plan.rows.unique().numel() == 4


def test_outputs_and_state_stay_inside_their_buffers() -> None:
    server = Server()
    wide = {
        name: torch.full((3, *tensor.shape), -77, dtype=tensor.dtype)
        for name, tensor in vars(server.plan).items()
    }
    server.plan = ResolvePlan(**{name: tensor[1] for name, tensor in wide.items()})
    server.resolve([0, 9, 16, 21])
    for tensor in wide.values():
        assert tensor[0].eq(-77).all() and tensor[2].eq(-77).all()
    assert server.states.positions[0, 1].eq(-1).all()  # the neighbour's line


def test_a_replay_with_other_values_equals_a_fresh_run_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [([0, 1, 2, 3], [4, 5], (0, 1)), ([2, 9], [16, 4, 7], (1, -1)), ([], [3, 2, 1, 0], (-1, 0))]
    replayed, eager = Server(batch=2), Server(batch=2)
    selection = torch.empty(2, K, dtype=torch.int32)
    lengths, slots = torch.full((2,), 24, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    for first, second, requests in steps:
        rows = [row + [-1] * (K - len(row)) for row in (first, second)]
        selection.copy_(torch.tensor(rows))
        slots.copy_(torch.tensor(requests))
        replayed.poison()
        with monkeypatch.context() as patch:
            for query in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__"):
                patch.setattr(torch.Tensor, query, forbidden)
            resolve(
                selection, lengths, slots, replayed.tables, replayed.state, replayed.plan, replayed.scratch
            )
        eager.plan = ResolvePlan.allocate(2, 1, K, "cpu")
        eager.resolve(first, second, slots=requests)
        assert torch.equal(replayed.plan.rows, eager.plan.rows)
        assert torch.equal(replayed.plan.stats, eager.plan.stats)
        assert replayed.misses() == eager.misses()
        assert torch.equal(replayed.state.lru, eager.state.lru)


def forbidden(*args: object, **kwargs: object) -> None:
    raise AssertionError("a launch read a device value on the host")


def test_tables_past_two_gigaelements_are_addressed_in_64_bits() -> None:
    script = """
        import mmap, torch
        from hisparsim_kernels import interpreter
        interpreter.activate()
        from hisparsim_kernels.hot_state import HostGenerations, HotState
        from hisparsim_kernels.resolve import resolve
        from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
        LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: pages exist once touched
        def lazy(dtype, *shape):
            numel = shape[0] * shape[1]
            memory = mmap.mmap(-1, numel * dtype.itemsize, flags=LAZY)
            return torch.frombuffer(memory, dtype=dtype).view(shape)
        requests, pages, hot, last = 140_000, 16_384, 16_384, 139_999
        tables = ResidencyTables(
            lazy(torch.int32, requests, pages), lazy(torch.int32, requests, pages), lazy(torch.int32,
            requests, 256),
            HostGenerations.allocate(9, "cpu").generations, 128)
        state = HotState(*(lazy(dtype, requests, hot) for dtype in (torch.int32, torch.int32, torch.int16)))
        tables.resident_blocks[last], tables.host_blocks[last], tables.hot_blocks[last] = -1, -1, 30
        tables.host_blocks[last, 16_000], state.positions[last] = 8, -1
        state.lru[last] = torch.arange(hot).short()
        plan = ResolvePlan.allocate(1, 1, 8, "cpu")
        scratch = ResolveScratch.allocate(1, 1, 8, hot, 2**20, "cpu")
        selection = torch.full((1, 8), -1, dtype=torch.int32)
        selection[0, 0] = 16_000 * 64 + 5
        one = torch.tensor([2**20], dtype=torch.int32)
        for misses in (1, 0):
            resolve(selection, one, torch.tensor([last], dtype=torch.int32), tables, state, plan, scratch)
            assert plan.rows[0, 0] == 30 * 128 and plan.num_misses[0] == misses, (plan.rows, plan.num_misses)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def narrowed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Server], dict[str, Any]]:
    """Arguments of a resolve in which one tensor of the tables, the plan, the scratch or the state is
    changed."""

    def build(server: Server) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "selection": torch.zeros(1, K, dtype=torch.int32), "lengths": torch.ones(1, dtype=torch.int32),
            "request_slots": torch.zeros(1, dtype=torch.int32), "tables": server.tables,
            "state": server.state,
            "plan": server.plan, "scratch": server.scratch,
        }  # fmt: skip
        owner, _, attribute = name.partition(".")
        if attribute:
            holder = arguments[owner]
            arguments[owner] = type(holder)(**{**vars(holder), attribute: change(getattr(holder, attribute))})
        else:
            arguments[name] = change(arguments[name])
        return arguments

    return build


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("selection", torch.Tensor.long, DtypeError, "selection has dtype torch.int64"),
        ("selection", lambda t: torch.zeros(1, HOT + 1, dtype=torch.int32), RangeError, "query_len . k is 9"),
        ("selection", lambda t: torch.zeros(1, 2 * K, dtype=torch.int32)[:, ::2], StrideError, "selection"),
        ("selection", lambda t: torch.zeros(2, K, dtype=torch.int32), ShapeError, r"\(2, 4\)"),
        ("lengths", torch.Tensor.long, DtypeError, "lengths"),
        ("lengths", lambda t: t.to("meta"), DeviceError, "lengths on meta"),
        ("request_slots", lambda t: t.repeat(2), ShapeError, "request_slots"),
        ("tables.host_blocks", lambda t: t[:, :5].contiguous(), ShapeError, "host_blocks"),
        ("tables.hot_blocks", lambda t: t[:, :1].contiguous(), RangeError, "hold 8 hot rows"),
        ("tables.rows_per_block", lambda v: 2, RangeError, "rows_per_block is 2"),
        ("tables.page_rows", lambda v: 0, RangeError, "page_rows is 0"),
        ("tables.host_generations", lambda t: torch.zeros(2**29, dtype=torch.int32, device="meta"),
        RangeError, "int32"),
        ("state.lru", torch.Tensor.int, DtypeError, "lru has dtype torch.int32"),
        ("state.generations", lambda t: t[:1], ShapeError, "generations"),
        ("plan.rows", lambda t: t[:, :2], ShapeError, "plan.rows"),
        ("plan.stats", torch.Tensor.float, DtypeError, "plan.stats"),
        ("scratch.wanted", lambda t: t[:0], RangeError, "lines of scratch.wanted is 0"),
        ("scratch.first_entry", lambda t: torch.zeros(1, 99, dtype=torch.int16), RangeError, "6 pages"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_with_its_value(
    name: str, change: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolve(**narrowed(name, change)(Server()))


def test_hot_rows_past_int16_slot_ids_are_refused() -> None:
    with pytest.raises(RangeError, match="hot_rows is 32769"):
        HotStates.allocate(1, 1, 32769, "cpu")
    with pytest.raises(RangeError, match="num_host_blocks is 33554433"):
        HostGenerations.allocate(2**25 + 1, "meta")


def test_the_sequential_model_itself_follows_the_published_order() -> None:
    model = SequentialHotBuffer(4)
    a, b, c, d, e = (HostRow(block, 0, 1) for block in range(5))
    assert [miss.slot for miss in model.step([a, b, c]).misses] == [0, 1, 2]
    step = model.step([b, d, b])  # the repeat counts once
    assert (step.num_hits, step.misses[0].slot, model.order) == (1, 3, [0, 2, 3, 1])
    assert model.step([e]).misses[0].slot == 0
    with pytest.raises(ValueError, match="5 distinct rows needed, 4 hot rows"):
        model.step([a, b, c, d, e])
