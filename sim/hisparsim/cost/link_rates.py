"""Rates of a GPU's host link as a scenario has them: node preset, overrides, placement of host memory.

| kind of copy | who | rate |
|---|---|---|
| bulk (DMA) | prefill staging, write-back, restore, offload tier | copy engine |
| gather | missed rows, read by kernels from mapped host memory | kernel copies, lower |

Rates are those with every GPU of the deployment copying at once. Both directions together get less than
their sum: the `duplex` rates hold while the other direction is busy on the same link.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsim.cost.calibration_file import calibration_of
from hisparsim.specs.nodes import CopyMode, NodeSpec
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.sections import CostSource, HostPlacement

_GB = 1e9


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second of one GPU's host link; `inf` stands for a free link."""

    h2d: float
    d2h: float
    h2d_duplex: float
    """Host to device while the other direction is busy."""
    d2h_duplex: float
    gather: float
    """Rows read by kernels, all GPUs at once."""
    gather_duplex: float
    host_dram: float
    """Of the whole node, reads and writes together."""
    socket: float
    """Between the sockets, each way; `inf` where nothing crosses."""
    num_gpus: int
    """GPUs that copy at once."""
    num_writers: int
    """GPUs that write to the host: one a replica, its ranks share the pool."""
    num_replicas: int
    crossing_share: float
    """Share of the bytes that cross the socket link, of the GPU that crosses most."""
    crossing_gpus: float
    """GPUs that load one direction of the socket link at once, counted with that share."""
    read_latency_s: float
    """One dependent read of host memory by the GPU that is farthest from it."""

    @property
    def both(self) -> float:
        """Both directions of one link together."""
        return self.h2d_duplex + self.d2h_duplex


def link_rates(scenario: Scenario) -> LinkRates:
    """Query: the rates that a scenario's node, `links.*` overrides and `node.host_placement` give.

    Under `cost.source = calibration` they are the measured ones. Raises ScenarioError where its file is none.
    """
    if scenario.cost.source is CostSource.CALIBRATION:
        return _calibrated(scenario)
    node, links = scenario.node_spec, scenario.links
    num_gpus = scenario.parallel.tp * scenario.parallel.dp
    num_writers = scenario.parallel.dp
    bulk = _Mode.of(node.pcie.copy_engine, num_gpus, num_writers)
    kernel = _Mode.of(node.pcie.kernel, num_gpus, num_writers)
    crossing_share, crossing_gpus = _crossing(node, scenario.node.host_placement, num_gpus)
    distance = 1.0 + crossing_share * (
        node.pcie.remote_host_read_latency_s / node.pcie.host_read_latency_s - 1.0
    )
    socket = node.socket_link_bytes_per_s if links.socket_gb_per_s is None else links.socket_gb_per_s * _GB
    dram = node.host_dram_bytes_per_s if links.host_dram_gb_per_s is None else links.host_dram_gb_per_s * _GB
    if scenario.node.host_placement is HostPlacement.ONE_SOCKET and links.host_dram_gb_per_s is None:
        dram /= node.num_sockets
    crosses = socket is not None and crossing_gpus > 0
    cap_socket = socket if crosses and socket is not None else float("inf")
    per_gpu = min(dram / num_gpus, cap_socket / crossing_gpus if crosses else float("inf"))
    h2d = _override(links.h2d_gb_per_s, bulk.h2d)
    d2h = _override(links.d2h_gb_per_s, bulk.d2h)
    gather = kernel.h2d / distance if links.gather_gb_per_s is None else links.gather_gb_per_s * _GB
    return LinkRates(
        h2d=_capped(h2d, per_gpu),
        d2h=_capped(d2h, per_gpu),
        h2d_duplex=_capped(h2d * bulk.h2d_share, per_gpu),
        d2h_duplex=_capped(d2h * bulk.d2h_share, per_gpu),
        gather=_capped(gather, per_gpu),
        gather_duplex=_capped(gather * kernel.h2d_share, per_gpu),
        host_dram=dram,
        socket=cap_socket,
        num_gpus=num_gpus,
        num_writers=num_writers,
        num_replicas=scenario.parallel.dp,
        crossing_share=crossing_share,
        crossing_gpus=crossing_gpus,
        read_latency_s=0.0 if gather == float("inf") else node.pcie.host_read_latency_s * distance,
    )


@dataclass(frozen=True)
class _Mode:
    """Rates of one way of copying, and what is left of each direction while the other is busy."""

    h2d: float
    d2h: float
    h2d_share: float
    d2h_share: float

    @classmethod
    def of(cls, mode: CopyMode, num_gpus: int, num_writers: int) -> _Mode:
        """Query: the rates for so many GPUs that read and so many that write.

        A single writer among readers is measured by nobody; it gets the two-way rates of one GPU alone.
        """
        reading = mode.alone if num_gpus == 1 else mode.all_gpus
        writing, duplex = (
            (mode.alone, mode.alone_duplex) if num_writers == 1 else (mode.all_gpus, mode.all_gpus_duplex)
        )
        return cls(
            h2d=reading.h2d_bytes_per_s,
            d2h=writing.d2h_bytes_per_s,
            h2d_share=min(1.0, duplex.h2d_bytes_per_s / reading.h2d_bytes_per_s),
            d2h_share=min(1.0, duplex.d2h_bytes_per_s / writing.d2h_bytes_per_s),
        )


def _override(gb_per_s: float | None, preset: float) -> float:
    return preset if gb_per_s is None else gb_per_s * _GB


def _capped(rate: float, cap: float) -> float:
    """Query: a rate within a cap; a free link stays free."""
    return rate if rate == float("inf") else min(rate, cap)


def _crossing(node: NodeSpec, placement: HostPlacement, num_gpus: int) -> tuple[float, float]:
    """Query: (share of bytes that cross for the farthest GPU, GPUs' worth of load on one direction)."""
    if node.num_sockets < 2 or placement is HostPlacement.LOCAL:
        return 0.0, 0.0
    if placement is HostPlacement.INTERLEAVED:
        near = min(num_gpus, node.gpus_per_socket)
        return 0.5, 0.5 * near
    far = num_gpus - min(num_gpus, node.gpus_per_socket)
    return (1.0, float(far)) if far else (0.0, 0.0)


def _calibrated(scenario: Scenario) -> LinkRates:
    """Query: the measured rates of the links of one rank, which reads and writes its own host pool."""
    links, infinite = calibration_of(scenario).links, float("inf")
    return LinkRates(
        h2d=links.h2d,
        d2h=links.d2h,
        h2d_duplex=links.h2d_duplex,
        d2h_duplex=links.d2h_duplex,
        gather=links.gather,
        gather_duplex=links.gather,
        host_dram=infinite,
        socket=infinite,
        num_gpus=scenario.parallel.tp,
        num_writers=1,
        num_replicas=1,
        crossing_share=0.0,
        crossing_gpus=0.0,
        read_latency_s=0.0,
    )
