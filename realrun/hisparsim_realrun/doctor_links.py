"""Where each GPU hangs and what its link gives: alone, both ways, all GPUs at once, by host placement.

Host memory is placed by pinning this process to one socket's cores while a buffer is first touched, which is
how the kernel's default policy decides. Without a GPU the two tiers are both in RAM: the copies between
them are measured, and a gather of scattered rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SIZE_BYTES = 256 << 20
REPEATS = 5
ROW_BYTES = 656
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class GpuPlace:
    """One GPU's place in the machine."""

    index: int
    name: str
    bus: str
    """PCI address."""
    numa_node: int | None
    link: str
    """PCIe generation and width as the device reports them, or empty."""


@dataclass(frozen=True)
class LinkReport:
    """Bytes a second of one GPU (or of RAM to RAM) in one situation, median of five copies."""

    gpu: int | None
    """None = copies within RAM."""
    host_node: int | None
    """Socket on which host memory lies; None = wherever it came to lie."""
    situation: str
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None


def gpu_places() -> tuple[GpuPlace, ...]:
    """Query: every GPU of this process with its bus address, socket and link."""
    places = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        parts = (
            getattr(properties, "pci_domain_id", 0),
            getattr(properties, "pci_bus_id", 0),
            getattr(properties, "pci_device_id", 0),
        )
        bus = "{:04x}:{:02x}:{:02x}.0".format(*parts)
        folder = Path("/sys/bus/pci/devices") / bus
        node = _read_int(folder / "numa_node")
        speed, width = _read(folder / "current_link_speed"), _read(folder / "current_link_width")
        link = f"{speed} x{width}" if speed and width else ""
        places.append(
            GpuPlace(index, properties.name, bus, node if node is None or node >= 0 else None, link)
        )
    return tuple(places)


def measure_gpu_links(places: tuple[GpuPlace, ...]) -> tuple[LinkReport, ...]:
    """Change: each GPU alone, both ways and all together, with host memory on each socket in turn."""
    reports: list[LinkReport] = []
    nodes: list[int | None] = [*host_nodes()]
    for node in nodes or [None]:
        with on_node(node):
            host = {place.index: _pinned(2) for place in places}
        device = {
            place.index: [torch.empty(SIZE_BYTES, dtype=torch.uint8, device=place.index) for _ in range(2)]
            for place in places
        }
        for place in places:
            copies = _Copies([place.index], host, device)
            reports.append(
                LinkReport(
                    place.index,
                    node,
                    "alone",
                    copies.rate(h2d=True, d2h=False),
                    copies.rate(h2d=False, d2h=True),
                )
            )
            both = copies.rate(h2d=True, d2h=True)
            reports.append(LinkReport(place.index, node, "both ways", both, both))
        if len(places) > 1:
            copies = _Copies([place.index for place in places], host, device)
            reports.append(
                LinkReport(
                    None,
                    node,
                    "all GPUs, a GPU",
                    copies.rate(h2d=True, d2h=False),
                    copies.rate(h2d=False, d2h=True),
                )
            )
            both = copies.rate(h2d=True, d2h=True)
            reports.append(LinkReport(None, node, "all GPUs both ways, a GPU", both, both))
        del host, device
    return tuple(reports)


def measure_host_links() -> tuple[LinkReport, ...]:
    """Change: copies from RAM to RAM of large pieces, and of scattered rows."""
    count = (64 << 20) // ROW_BYTES
    source = np.ones(count, f"V{ROW_BYTES}")
    target = np.zeros(count, f"V{ROW_BYTES}")
    rows = np.random.default_rng([1, 2]).permutation(count)[: count // 8]
    bulk = _median_rate(source.nbytes, lambda: np.copyto(target, source))
    gather = _median_rate(len(rows) * ROW_BYTES, lambda: target.__setitem__(slice(len(rows)), source[rows]))
    return (
        LinkReport(None, None, "RAM to RAM, large pieces", bulk, bulk),
        LinkReport(None, None, f"RAM to RAM, rows of {ROW_BYTES} B", gather, None),
    )


def host_nodes() -> list[int]:
    """Query: sockets with cores that this process may use, empty where the kernel tells none."""
    return [node for node in sorted(_cores_of_nodes()) if _cores_of_nodes()[node]]


@contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Change: run on one socket's cores for the block, so that memory touched there lies there."""
    if node is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _cores_of_nodes()[node])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Copies:
    """Copies of several GPUs at once."""

    def __init__(
        self, gpus: list[int], host: dict[int, list[torch.Tensor]], device: dict[int, list[torch.Tensor]]
    ) -> None:
        self.gpus = gpus
        self.host = host
        self.device = device
        self.streams = {
            gpu: [torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)]  # type: ignore[no-untyped-call]
            for gpu in gpus
        }

    def rate(self, *, h2d: bool, d2h: bool) -> float:
        """Query: bytes a second of one direction of one GPU, all chosen ones at once."""

        def once() -> None:
            for gpu in self.gpus:
                up, down = self.streams[gpu]
                if h2d:
                    with torch.cuda.stream(up):
                        self.device[gpu][0].copy_(self.host[gpu][0], non_blocking=True)
                if d2h:
                    with torch.cuda.stream(down):
                        self.host[gpu][1].copy_(self.device[gpu][1], non_blocking=True)
            for gpu in self.gpus:
                torch.cuda.synchronize(gpu)

        once()
        return _median_rate(SIZE_BYTES, once)


def _median_rate(num_bytes: int, copy: object) -> float:
    assert callable(copy)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        copy()
        times.append(time.perf_counter() - started)
    return num_bytes / float(np.median(times))


def _pinned(count: int) -> list[torch.Tensor]:
    return [torch.ones(SIZE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(count)]


def _cores_of_nodes() -> dict[int, set[int]]:
    """Query: socket -> its cores that this process may use."""
    mine = os.sched_getaffinity(0)
    found: dict[int, set[int]] = {}
    for folder in _NODES.glob("node[0-9]*") if _NODES.is_dir() else ():
        text = _read(folder / "cpulist")
        if text:
            found[int(folder.name[4:])] = _cores(text) & mine
    return found


def _cores(text: str) -> set[int]:
    """Query: the numbers of a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.lstrip("-").isdigit() else None
