# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Hot-buffer state on the device: what each hot slot holds and in which order slots are given up.

One `HotState` serves one index group (an indexer layer and the layers that follow its selection); a request
owns one line of it, addressed by its request slot. The rows' data lie elsewhere, in the hot pages of every
layer of the group.

    positions    [num_requests, hot_rows]  int32, token position held by the slot, -1 when empty
    generations  [num_requests, hot_rows]  int32, generation of the host block the row was copied from
    lru          [num_requests, hot_rows]  int16, slots in order of eviction: least recently used first

**A hot row is keyed by its position and by the generation of its host block.** A host block gets a new
generation, never used before, whenever it is handed out again or one of its rows is rewritten (a rejected
draft, for instance): `renew_host_blocks`. A slot with another generation is no hit; it stays where it is in
the order until it is evicted. So recycling costs one small kernel a step instead of a sweep over every slot
of every layer, and it is as exact as keying by the global host row id (host block * page rows + row), which
moves with the table. A request slot that changes hands is emptied by `reset_requests`, in all groups at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import find_config
from hisparsim_kernels.errors import (
    check_contiguous,
    check_dtype,
    check_range,
    check_same_device,
    check_shape,
)

MAX_HOT_ROWS = 32768
"""Slot ids are int16: 0 to 32767."""


@triton.jit
def hot_reset_kernel(
    request_slots_ptr, positions_ptr, generations_ptr, lru_ptr, num_requests, hot_rows, BLOCK: tl.constexpr
):
    """Grid (listed requests, groups): empty every slot and put the order back to 0, 1, 2, ..."""
    request = tl.load(request_slots_ptr + tl.program_id(0)).to(tl.int64)
    if request < 0:
        return
    line = (tl.program_id(1).to(tl.int64) * num_requests + request) * hot_rows
    for start in range(0, hot_rows, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < hot_rows
        tl.store(positions_ptr + line + slot, -1, mask=inside)
        tl.store(generations_ptr + line + slot, 0, mask=inside)
        tl.store(lru_ptr + line + slot, slot.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def host_renew_kernel(
    blocks_ptr, generations_ptr, clock_ptr, num_blocks, num_host_blocks, BLOCK: tl.constexpr
):
    """One program: give each listed host block (-1: none) a generation that no block has had."""
    clock = tl.load(clock_ptr)
    for start in range(0, num_blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block = tl.load(blocks_ptr + at, mask=at < num_blocks, other=-1)
        tl.store(
            generations_ptr + block.to(tl.int64),
            clock + at + 1,
            mask=(block >= 0) & (block < num_host_blocks),
        )
    tl.debug_barrier()  # every warp has read the clock
    tl.store(clock_ptr, clock + num_blocks)


@dataclass(frozen=True)
class HotState:
    """State of one index group; shapes in the module's docstring. Mutated by `resolve` and
    `reset_requests`."""

    positions: torch.Tensor
    generations: torch.Tensor
    lru: torch.Tensor

    @property
    def num_requests(self) -> int:
        """Request slots."""
        return int(self.positions.shape[0])

    @property
    def hot_rows(self) -> int:
        """Hot slots of one request."""
        return int(self.positions.shape[1])


@dataclass(frozen=True)
class HotStates:
    """States of all index groups in one allocation: each tensor has a leading group dimension."""

    positions: torch.Tensor
    generations: torch.Tensor
    lru: torch.Tensor

    @staticmethod
    def allocate(num_groups: int, num_requests: int, hot_rows: int, device: torch.device | str) -> HotStates:
        """Empty states: 10 bytes a slot. Raises `RangeError` if a slot id does not fit into int16."""
        check_range("hot_rows", hot_rows, 1, MAX_HOT_ROWS, "slot ids are int16")
        check_range("num_groups", num_groups, 1, 65535, "index groups of the model")
        check_range("num_requests", num_requests, 1, 2**31 - 1, "request slots")
        shape = (num_groups, num_requests, hot_rows)
        order = torch.arange(hot_rows, dtype=torch.int32, device=device).to(torch.int16)
        return HotStates(
            positions=torch.full(shape, -1, dtype=torch.int32, device=device),
            generations=torch.zeros(shape, dtype=torch.int32, device=device),
            lru=order.expand(shape).contiguous(),
        )

    def group(self, index: int) -> HotState:
        """The state of one index group, a view."""
        return HotState(self.positions[index], self.generations[index], self.lru[index])


def reset_requests(states: HotStates, request_slots: torch.Tensor) -> None:
    """Empty the hot slots of the listed requests ([n] int32, -1: none) in every group; call it when a request
    slot is given to another request or its hot pages are leased anew."""
    check_dtype("request_slots", request_slots, torch.int32)
    check_shape("request_slots", request_slots, (None,))
    check_contiguous("request_slots", request_slots)
    check_shape("states.positions", states.positions, (None, None, None))
    for name, tensor, dtype in (
        ("positions", states.positions, torch.int32),
        ("generations", states.generations, torch.int32),
        ("lru", states.lru, torch.int16),
    ):
        check_dtype(f"states.{name}", tensor, dtype)
        check_shape(f"states.{name}", tensor, states.positions.shape)
        check_contiguous(f"states.{name}", tensor)
    check_same_device(
        request_slots=request_slots, positions=states.positions, generations=states.generations,
        lru=states.lru,
    )  # fmt: skip
    num_groups, num_requests, hot_rows = states.positions.shape
    if request_slots.numel() == 0:
        return
    config = find_config("resolve", "hot_reset", "default", arch_of(states.positions.device))
    hot_reset_kernel[(request_slots.numel(), num_groups)](
        request_slots, states.positions, states.generations, states.lru, num_requests, hot_rows,
        **config.launch_arguments(),
    )  # fmt: skip


@dataclass(frozen=True)
class HostGenerations:
    """Generation of each host block, shared by all groups and layers.

    generations [num_host_blocks] int32; clock [1] int32, the last generation given out. Generations repeat
    after 2^32 renewals; a stale row would have to stay selected-free in its slot that long to be mistaken.
    """

    generations: torch.Tensor
    clock: torch.Tensor

    @staticmethod
    def allocate(num_host_blocks: int, device: torch.device | str) -> HostGenerations:
        """All blocks at generations of their own. Raises `RangeError` past 2^25 blocks (host rows are
        int32)."""
        check_range("num_host_blocks", num_host_blocks, 1, 2**25, "host row ids (block * 64 + row) are int32")
        return HostGenerations(
            generations=torch.arange(num_host_blocks, dtype=torch.int32, device=device),
            clock=torch.full((1,), num_host_blocks, dtype=torch.int32, device=device),
        )


def renew_host_blocks(hosts: HostGenerations, blocks: torch.Tensor) -> None:
    """Give the listed host blocks ([n] int32, each once, -1: none) new generations: hot rows copied from them
    before are misses from now on. Call it when blocks are handed out again and when rows of them are
    rewritten."""
    check_dtype("blocks", blocks, torch.int32)
    check_shape("blocks", blocks, (None,))
    check_contiguous("blocks", blocks)
    for name, tensor, extent in (("generations", hosts.generations, None), ("clock", hosts.clock, 1)):
        check_dtype(f"hosts.{name}", tensor, torch.int32)
        check_shape(f"hosts.{name}", tensor, (extent,))
        check_contiguous(f"hosts.{name}", tensor)
    check_same_device(blocks=blocks, generations=hosts.generations, clock=hosts.clock)
    if blocks.numel() == 0:
        return
    config = find_config("resolve", "host_renew", "default", arch_of(blocks.device))
    host_renew_kernel[(1,)](
        blocks,
        hosts.generations,
        hosts.clock,
        blocks.numel(),
        hosts.generations.numel(),
        **config.launch_arguments(),
    )
