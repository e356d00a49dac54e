"""Resolve and gather on a device against the sequential LRU model: the residency part of the GPU checks.

On a GPU each step is a replay of one captured graph, with every input changed in place; the model runs on the
host. Order of slots, places and the bytes of every hot row must be equal. What only a GPU shows is in here:
the order of memory between launches and inside a program, pinned memory read by a kernel, and replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references.lru import HostRow, SequentialHotBuffer
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch


@dataclass(frozen=True)
class ResidencyCase:
    """Sizes of one run; `pages` of context a request, a quarter of them resident."""

    batch: int
    query_len: int
    k: int
    hot_rows: int
    pages: int
    steps: int


GPU_CASES = (
    ResidencyCase(batch=8, query_len=1, k=2048, hot_rows=4096, pages=256, steps=12),
    ResidencyCase(batch=4, query_len=4, k=2048, hot_rows=10240, pages=256, steps=6),
)
CPU_CASES = (ResidencyCase(batch=3, query_len=2, k=40, hot_rows=100, pages=6, steps=4),)


class _Run:
    """One case: persistent tensors on the device, their meaning on the host, and the model."""

    def __init__(self, case: ResidencyCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case.hot_rows)
        self.layout = PageLayout.of_groups(656, (4,))
        on_gpu = device.type == "cuda"
        num_host = case.batch * case.pages
        self.host = torch.empty(num_host, self.layout.host_block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.host.random_(0, 256, generator=self.generator)
        self.host_table = (
            torch.randperm(num_host, generator=self.generator).int().view(case.batch, case.pages)
        )
        self.resident = torch.rand(case.batch, case.pages, generator=self.generator) < 0.25
        hot_pages = -(-case.hot_rows // self.layout.page_rows)
        self.hot_table = torch.arange(case.batch * hot_pages, dtype=torch.int32).view(case.batch, hot_pages)
        self.pool = torch.zeros(
            case.batch * hot_pages + 1, self.layout.block_bytes, dtype=torch.uint8, device=device
        )
        self.hosts = HostGenerations.allocate(num_host, device)
        self.tables = ResidencyTables(
            resident_blocks=torch.where(self.resident, case.batch * hot_pages, -1).int().to(device),
            host_blocks=self.host_table.to(device),
            hot_blocks=self.hot_table.to(device),
            host_generations=self.hosts.generations,
            rows_per_block=self.layout.rows_per_block,
        )
        self.states = HotStates.allocate(1, case.batch, case.hot_rows, device)
        self.plan = ResolvePlan.allocate(case.batch, case.query_len, case.k, device)
        tokens = case.pages * self.layout.page_rows
        self.scratch = ResolveScratch.allocate(
            case.batch, case.query_len, case.k, case.hot_rows, tokens, device
        )
        self.selection = torch.zeros(case.batch * case.query_len, case.k, dtype=torch.int32, device=device)
        self.lengths = torch.full((case.batch,), tokens, dtype=torch.int32, device=device)
        self.slots = torch.arange(case.batch, dtype=torch.int32, device=device)
        self.models = [SequentialHotBuffer(case.hot_rows) for _ in range(case.batch)]
        self.epochs = torch.zeros(num_host, dtype=torch.int64)

    def launch(self) -> None:
        """The work of one step; what a graph captures."""
        resolve(
            self.selection,
            self.lengths,
            self.slots,
            self.tables,
            self.states.group(0),
            self.plan,
            self.scratch,
            query_len=self.case.query_len,
        )
        plan = self.plan
        gather_rows(
            self.host,
            self.pool,
            plan.miss_host_rows,
            plan.miss_hot_rows,
            plan.num_misses,
            self.layout,
            group=0,
        )

    def change(self) -> torch.Tensor:
        """New selection (returned, on the host), and every eighth host block rewritten."""
        case, tokens = self.case, self.case.pages * self.layout.page_rows
        recent = torch.linspace(0, 6, tokens).exp().expand(case.batch * case.query_len, tokens)
        selection = torch.multinomial(recent, case.k, generator=self.generator).int()
        selection[0, 1::7] = -1
        self.selection.copy_(selection)
        stale = torch.randperm(self.host.shape[0], generator=self.generator)[: self.host.shape[0] // 8]
        self.host[stale] = self.host[stale] ^ 0xFF
        self.epochs[stale] += 1
        renew_host_blocks(self.hosts, stale.int().to(self.device))
        return selection

    def verify(self, selection: torch.Tensor) -> str | None:
        """What differs from the model, or None."""
        case, page_rows = self.case, self.layout.page_rows
        rows = self.plan.rows.cpu().view(case.batch, -1)
        orders, pool = self.states.lru[0].cpu(), self.pool.cpu()
        epochs = self.epochs.tolist()
        sources, targets = [], []
        for request, line in enumerate(selection.view(case.batch, -1).tolist()):
            hot, host = self.hot_table[request].tolist(), self.host_table[request].tolist()
            resident, answered = self.resident[request].tolist(), rows[request].tolist()
            wanted = {}
            for position in line:
                page, row = divmod(position, page_rows)
                if position >= 0 and not resident[page]:
                    wanted[position] = HostRow(host[page], row, epochs[host[page]])
            step = self.models[request].step(list(wanted.values()))
            if orders[request].tolist() != self.models[request].order:
                return f"order of slots of request {request}"
            for entry, position in enumerate(line):
                if position in wanted:
                    slot = step.slots[wanted[position]]
                    flat = hot[slot // page_rows] * self.layout.rows_per_block + slot % page_rows
                    if answered[entry] != flat:
                        return f"row of entry {entry} of request {request}"
                    sources.append(wanted[position].block * page_rows + wanted[position].row)
                    targets.append(flat)
        source, target = torch.tensor(sources), torch.tensor(targets)
        for layer in range(4):
            held = self.layout.layer_rows(pool, layer)[target]
            begin = layer * self.layout.page_bytes
            pages = self.host[:, begin : begin + self.layout.page_bytes].view(-1, page_rows, 656)
            if not torch.equal(held, pages[source // page_rows, source % page_rows]):
                return f"bytes of hot rows in layer {layer}"
        return None


def check_residency(device: torch.device) -> tuple[bool, str]:
    """Whether resolve and gather agree with the model over all cases, and a line that says what differs."""
    total = 0
    for case in GPU_CASES if device.type == "cuda" else CPU_CASES:
        run = _Run(case, device)
        replay: Callable[[], None] = run.launch
        if device.type == "cuda":
            from hisparsim_kernels.bench import capture

            replay = capture(run.launch, 1).replay
            reset_requests(run.states, run.slots)  # warm-up before the capture has moved real slots
        for number in range(case.steps):
            selection = run.change()
            replay()
            wrong = run.verify(selection)
            if wrong is not None:
                return False, f"step {number} of {case}: {wrong} differs from the model"
            total += case.batch
    return True, f"{total} request steps equal the sequential model"
