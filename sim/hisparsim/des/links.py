"""Host links as SimPy resources with processor sharing: what crosses PCIe besides the steps' own transfers.

Life of a transfer: `transfer()` makes it a flow of its link and direction and returns an event. Flows of one
direction share its rate equally; whenever one starts or ends, all rates are worked out anew and the next
completion is scheduled; the event succeeds when the last byte has moved.

    the rate of a direction =  its own cap, or its lower cap while the other direction of the link is busy,
                               cut down, all directions of all links alike, until host memory and the
                               socket link hold (weighted by the GPUs that move the same bytes)

One link stands for the GPUs of a replica: under TP every rank reads the same rows over its own link at once,
and one rank writes where the pool is shared. Bytes are always those of one GPU.

Everything is an integer: time in ns, rates in whole bytes/s, progress in nano-bytes (bytes/s x ns). So the
order in which simultaneous transfers are submitted does not matter, and no byte is lost to rounding. A flow's
end is rounded up to the next ns.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import simpy
from mypy_extensions import mypyc_attr

from hisparsim.cost.link_rates import LinkRates
from hisparsim.cost.model import QUIET, Background

NANO = 1_000_000_000
"""Nano-bytes a byte, and nanoseconds a second."""
_LEAST_RATE = 1_000_000
"""Bytes/s below which sharing in whole bytes/s would be coarse."""
_HALVES = 2
"""Socket weights are counted in halves: interleaved memory sends half of the bytes across."""


@mypyc_attr(native_class=False)
class LinkError(ValueError):
    """A transfer or a rate that a link cannot have."""


@mypyc_attr(native_class=False)
class LinkLawError(RuntimeError):
    """A link moved more than its bandwidth allows (law L8), or lost bytes."""


class Direction(Enum):
    H2D = "h2d"
    D2H = "d2h"


class TransferKind(Enum):
    """What a flow carries."""

    WRITE_BACK = "write_back"
    """Sealed pages to the host pool."""
    OFFLOAD = "offload"
    """Cached pages to an ordinary offload tier."""
    STAGE = "stage"
    """A whole prompt to the host pool after its prefill."""
    RESTORE = "restore"
    """Pages from an offload tier or the host pool to the GPU."""

    @property
    def direction(self) -> Direction:
        return Direction.H2D if self is TransferKind.RESTORE else Direction.D2H


@dataclass(order=True, slots=True)
class _Flow:
    target: int
    """Progress of its direction (nano-bytes a flow) at which it is done."""
    number: int
    num_bytes: int = field(compare=False)
    kind: TransferKind = field(compare=False)
    done: simpy.Event = field(compare=False)


@dataclass(slots=True)
class _Lane:
    """One direction of one link. Its flows progress alike, so one number tells how far each has come."""

    cap: int | None
    """Bytes/s for one GPU; None = free."""
    duplex_cap: int | None
    dram_weight: int
    """GPUs that move the same bytes at once."""
    socket_weight: int
    """Of these, in halves, those whose bytes cross the socket link."""
    direction: Direction
    flows: list[_Flow] = field(default_factory=list)
    progress: int = 0
    """Nano-bytes that each flow present since the start would have moved."""
    flow_rate: int = 0
    """Bytes/s of each flow now."""
    submitted_bytes: int = 0
    finished_bytes: int = 0
    ceiling: int = 0
    """Nano-bytes that the caps in force allowed so far."""

    @property
    def rate(self) -> int:
        """Bytes/s of all its flows together."""
        return self.flow_rate * len(self.flows)

    def moved(self) -> int:
        """Query: nano-bytes moved so far."""
        left = sum(max(flow.target - self.progress, 0) for flow in self.flows)
        return self.submitted_bytes * NANO - left


class HostLinks:
    """The host links of a node, one for each replica.

    >>> env = simpy.Environment()
    >>> links = HostLinks(env, rates)                               # doctest: +SKIP
    >>> yield links[0].transfer(2_875_392, TransferKind.WRITE_BACK)  # doctest: +SKIP
    """

    def __init__(self, env: simpy.Environment, rates: LinkRates) -> None:
        """Links at the given rates; raises LinkError where a rate is under 1 MB/s."""
        self._env = env
        self._dram = _whole_rate("host memory", rates.host_dram)
        socket = _whole_rate("the socket link", rates.socket)
        self._socket = None if socket is None else socket * _HALVES
        self._changed_ns = round(env.now)
        self._version = 0
        self._number = 0
        replicas = max(1, rates.num_replicas)
        readers = rates.num_gpus // replicas
        crossing = rates.crossing_gpus / replicas
        writers = max(1, rates.num_writers // replicas)
        self._links = tuple(
            HostLink(
                self,
                _Lane(
                    _whole_rate("host to device", rates.h2d),
                    _whole_rate("host to device, both busy", rates.h2d_duplex),
                    readers,
                    round(_HALVES * crossing),
                    Direction.H2D,
                ),
                _Lane(
                    _whole_rate("device to host", rates.d2h),
                    _whole_rate("device to host, both busy", rates.d2h_duplex),
                    writers,
                    round(_HALVES * crossing * writers / readers),
                    Direction.D2H,
                ),
            )
            for _ in range(replicas)
        )

    def __getitem__(self, replica: int) -> HostLink:
        return self._links[replica]

    def __len__(self) -> int:
        return len(self._links)

    @property
    def _lanes(self) -> list[_Lane]:
        return [lane for link in self._links for lane in link.lanes]

    def check(self) -> None:
        """Raise LinkLawError where more bytes moved than the bandwidth allows (L8), or bytes were lost."""
        self._advance()
        for index, link in enumerate(self._links):
            for lane in link.lanes:
                name = f"link {index} {lane.direction.value}"
                open_bytes = sum(flow.num_bytes for flow in lane.flows)
                if lane.submitted_bytes != lane.finished_bytes + open_bytes:
                    raise LinkLawError(
                        f"{name}: {lane.submitted_bytes} bytes submitted, {lane.finished_bytes} finished and "
                        f"{open_bytes} open"
                    )
                if lane.cap is not None and lane.moved() > lane.ceiling:
                    raise LinkLawError(
                        f"{name}: {lane.moved() // NANO} bytes moved, its caps allow {lane.ceiling // NANO}"
                    )
        dram = sum(lane.rate * lane.dram_weight for lane in self._lanes)
        if self._dram is not None and dram > self._dram:
            raise LinkLawError(f"host memory moves {dram} bytes/s, it can move {self._dram}")
        for direction in Direction:
            crossing = sum(
                lane.rate * lane.socket_weight for lane in self._lanes if lane.direction is direction
            )
            if self._socket is not None and crossing > self._socket:
                raise LinkLawError(
                    f"the socket link moves {crossing // _HALVES} bytes/s one way, it can move "
                    f"{self._socket // _HALVES}"
                )

    def _start(self, lane: _Lane, num_bytes: int, kind: TransferKind) -> simpy.Event:
        if num_bytes < 0:
            raise LinkError(f"a transfer of {num_bytes} bytes: bytes cannot be negative")
        done = self._env.event()
        lane.submitted_bytes += num_bytes
        if num_bytes == 0 or lane.cap is None:
            lane.finished_bytes += num_bytes
            return done.succeed()
        self._advance()
        self._finish()
        self._number += 1
        heapq.heappush(
            lane.flows, _Flow(lane.progress + num_bytes * NANO, self._number, num_bytes, kind, done)
        )
        self._reschedule()
        return done

    def _advance(self) -> None:
        """Change: move all flows on to the present."""
        now = round(self._env.now)
        elapsed = now - self._changed_ns
        if elapsed == 0:
            return
        self._changed_ns = now
        for link in self._links:
            both = all(lane.flows for lane in link.lanes)
            for lane in link.lanes:
                cap = lane.duplex_cap if both else lane.cap
                if lane.flows and cap is not None:
                    lane.ceiling += cap * elapsed
                lane.progress += lane.flow_rate * elapsed

    def _finish(self) -> None:
        """Change: end the flows whose last byte has moved."""
        for lane in self._lanes:
            while lane.flows and lane.flows[0].target <= lane.progress:
                flow = heapq.heappop(lane.flows)
                lane.finished_bytes += flow.num_bytes
                flow.done.succeed()

    def _reschedule(self) -> None:
        """Change: share the rates anew and wake up at the next completion."""
        self._share()
        self._version += 1
        version = self._version
        waits = [
            -((lane.progress - lane.flows[0].target) // lane.flow_rate) for lane in self._lanes if lane.flows
        ]
        if not waits:
            return
        wake = self._env.timeout(min(waits))
        assert wake.callbacks is not None
        wake.callbacks.append(lambda _: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._finish()
        self._reschedule()

    def _share(self) -> None:
        """Change: the rate of every lane, by filling all alike until a cap or a common limit is met."""
        open_lanes: list[tuple[_Lane, int]] = []
        for link in self._links:
            both = all(lane.flows for lane in link.lanes)
            for lane in link.lanes:
                cap = lane.duplex_cap if both else lane.cap
                lane.flow_rate = 0
                if lane.flows and cap is not None:
                    open_lanes.append((lane, cap))
        rates = fill(
            [cap for _, cap in open_lanes],
            [
                (self._dram, [lane.dram_weight for lane, _ in open_lanes]),
                *(
                    (
                        self._socket,
                        [lane.socket_weight if lane.direction is direction else 0 for lane, _ in open_lanes],
                    )
                    for direction in Direction
                ),
            ],
        )
        for (lane, _), rate in zip(open_lanes, rates, strict=True):
            lane.flow_rate = max(1, rate // len(lane.flows))


class HostLink:
    """The host link of one replica's GPUs."""

    def __init__(self, links: HostLinks, h2d: _Lane, d2h: _Lane) -> None:
        self._links = links
        self.lanes = (h2d, d2h)

    def transfer(self, num_bytes: int, kind: TransferKind) -> simpy.Event:
        """Change: start moving bytes (of one GPU). The event succeeds when the last one has moved."""
        return self._links._start(self._lane(kind.direction), num_bytes, kind)

    def background(self) -> Background:
        """Query: what the flows move now, for pricing a step that shares the link with them."""
        h2d, d2h = self.lanes
        if not (h2d.flows or d2h.flows):
            return QUIET
        return Background(h2d_bytes_per_s=float(h2d.rate), d2h_bytes_per_s=float(d2h.rate))

    def moved_bytes(self, direction: Direction) -> int:
        """Query: bytes moved so far, partly done transfers included, rounded down."""
        self._links._advance()
        return self._lane(direction).moved() // NANO

    def num_flows(self, direction: Direction) -> int:
        """Query: transfers under way."""
        return len(self._lane(direction).flows)

    def _lane(self, direction: Direction) -> _Lane:
        return self.lanes[0] if direction is Direction.H2D else self.lanes[1]


def fill(caps: Sequence[int], limits: Sequence[tuple[int | None, Sequence[int]]]) -> list[int]:
    """Query: max-min fair whole rates within caps and limits.

    A limit is (capacity, weights): the weighted rates add up to at most the capacity (None: no limit). All
    rates rise together; one stops where its cap or a limit that it loads is met.
    """
    rates = [0] * len(caps)
    rising = set(range(len(caps)))
    while rising:
        level = min(caps[index] for index in rising)
        for capacity, weights in limits:
            load = sum(weights[index] for index in rising)
            if capacity is not None and load:
                fixed = sum(weights[i] * rates[i] for i in range(len(caps)) if i not in rising)
                level = min(level, (capacity - fixed) // load)
        for index in rising:
            rates[index] = level
        full = {index for index in rising if caps[index] <= level}
        for capacity, weights in limits:
            load = sum(weights[index] for index in rising)
            if capacity is not None and load:
                used = sum(weight * rate for weight, rate in zip(weights, rates, strict=True))
                if capacity - used < load:
                    full |= {index for index in rising if weights[index]}
        rising -= full
    return rates


def _whole_rate(name: str, rate: float) -> int | None:
    """Query: a rate in whole bytes/s, None where it is infinite."""
    if rate == math.inf:
        return None
    if rate < _LEAST_RATE:
        raise LinkError(f"the rate of {name} is {rate:g} bytes/s: at least {_LEAST_RATE} are needed")
    return math.floor(rate)
