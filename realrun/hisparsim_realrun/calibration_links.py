"""Rates between the two memory tiers as the runner copies: whole pages beside compute, rows inside a step.

Page copies are measured while the compute threads multiply matrices, since they share cores and memory with
the steps beside which they run; the slowdown of those products is the contention that the file notes. One
copy engine serves both directions on a CPU, so each gets half of it while the other is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hisparsim.cost.calibration_file import CalibratedLinks

from .copies import CopyEngine
from .devices import Device
from .executor import Executor

REPEATS = 7
PAGES = 16
"""Pages of one measured transfer."""
ROWS = 512
"""Rows of one measured gather of one layer."""
_MATRIX = 256


@dataclass(frozen=True)
class LinkSamples:
    """Bytes a second, median of ``REPEATS``; and what copies cost compute."""

    links: CalibratedLinks
    h2d_alone: float
    d2h_alone: float
    compute_slowdown: float
    """Time of products while copies run over their time without, minus 1."""
    spread: float
    """Largest (p75 - p25) / median among the rates."""


def measure_links(executor: Executor, device: Device) -> LinkSamples:
    """Change: copy pages and rows of the executor's pools to and fro; what they held is lost."""
    pools = executor.pools
    layout = pools.geometry.layout
    pages = max(min(PAGES, pools.num_blocks - 1, pools.host.shape[0] - 1), 1)
    numbers = 1 + np.arange(pages, dtype=np.int64) % max(pools.num_blocks - 1, 1)
    blocks = np.repeat(numbers[:, None], len(layout.group_layers), axis=1)
    host_blocks = np.arange(pages, dtype=np.int64) + np.int64(min(1, pools.host.shape[0] - 1))
    engine = CopyEngine(device, inline=False)
    try:
        rates: dict[str, list[float]] = {}
        for name, copy in (
            ("d2h", lambda: pools.copy_to_host(blocks, host_blocks)),
            ("h2d", lambda: pools.copy_to_gpu(blocks, host_blocks)),
        ):
            rates[f"{name}_alone"] = [_rate(engine, copy, device, None) for _ in range(REPEATS)]
            busy = _Products(device)
            rates[name] = [_rate(engine, copy, device, busy) for _ in range(REPEATS)]
        quiet, slowed = _slowdown(engine, lambda: pools.copy_to_host(blocks, host_blocks), device)
    finally:
        engine.close()
    rates["gather"] = [_gather_rate(executor, device) for _ in range(REPEATS)]
    middle = {name: float(np.median(values)) for name, values in rates.items()}
    share = 0.5 if not device.is_cuda else _duplex_share(device)
    links = CalibratedLinks(
        h2d=middle["h2d"],
        d2h=middle["d2h"],
        h2d_duplex=middle["h2d"] * share,
        d2h_duplex=middle["d2h"] * share,
        gather=middle["gather"],
    )
    return LinkSamples(
        links,
        middle["h2d_alone"],
        middle["d2h_alone"],
        slowed / quiet - 1.0,
        max(_spread(values) for values in rates.values()),
    )


class _Products:
    """Work for the compute threads while a copy is under way."""

    def __init__(self, device: Device) -> None:
        self.a = torch.ones(_MATRIX, _MATRIX, device=device.torch_device, dtype=device.dtype)

    def once(self) -> None:
        torch.mm(self.a, self.a)


def _rate(engine: CopyEngine, copy: Callable[[], int], device: Device, busy: _Products | None) -> float:
    """Query: bytes a second of one transfer by the copy engine, from request to completion."""
    moved: list[int] = []
    device.synchronize()
    started = time.perf_counter_ns()
    engine.start(0, None, lambda: moved.append(copy()) or moved[-1])  # type: ignore[func-returns-value]
    landed = engine.landed()
    while not landed:
        if busy is not None:
            busy.once()
        else:
            time.sleep(0)
        landed = engine.landed()
    ended = time.perf_counter_ns() if device.is_cuda else landed[0].at_ns
    return moved[0] / max(ended - started, 1) * 1e9


def _slowdown(engine: CopyEngine, copy: Callable[[], int], device: Device) -> tuple[float, float]:
    """Query: seconds of one product, (quiet, while copies run)."""
    products = _Products(device)
    products.once()

    def timed(until: Callable[[int], bool]) -> float:
        started, count = time.perf_counter(), 0
        while not until(count):
            products.once()
            count += 1
        device.synchronize()
        return (time.perf_counter() - started) / max(count, 1)

    quiet = timed(lambda count: count >= 200)
    for number in range(REPEATS):
        engine.start(number, None, copy)
    left = [REPEATS]

    def drained(count: int) -> bool:
        left[0] -= len(engine.landed())
        return left[0] <= 0 and count > 0

    return quiet, timed(drained)


def _gather_rate(executor: Executor, device: Device) -> float:
    """Query: bytes a second of rows fetched into scattered places, one layer, inside a step."""
    pools, layout = executor.pools, executor.pools.geometry.layout
    generator = np.random.default_rng([ROWS, 3])
    host_rows = generator.integers(0, pools.host.shape[0] * layout.page_rows, ROWS)
    first = layout.rows_per_block
    rows = first + generator.permutation(max((pools.num_blocks - 1) * first, ROWS))[:ROWS]
    device.synchronize()
    started = time.perf_counter_ns()
    executor.kernels.copy_from_host(0, host_rows, rows)
    device.synchronize()
    return ROWS * layout.row_bytes / max(time.perf_counter_ns() - started, 1) * 1e9


def _duplex_share(device: Device) -> float:
    """Query: what a direction of a GPU's link keeps while the other is busy, by pinned copies of 64 MiB."""
    size = 64 << 20
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]

    def seconds(directions: tuple[bool, ...]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number, to_host in enumerate(directions):
            with torch.cuda.stream(streams[number]):
                if to_host:
                    host[number].copy_(gpu[number], non_blocking=True)
                else:
                    gpu[number].copy_(host[number], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds((True, False))
    alone = min(max(seconds((True,)), seconds((False,))) for _ in range(REPEATS))
    both = min(seconds((True, False)) for _ in range(REPEATS))
    return min(alone / both, 1.0)


def _spread(values: list[float]) -> float:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / middle)
