"""What is validated: one scenario a device, and three workloads that strain different things.

| name | arrivals | what it strains |
|---|---|---|
| `steady` | Poisson, at 60 % of what a simulation says is possible | TTFT without memory pressure |
| `pressure` | a closed loop of as many users as may run | waits for memory, preemption, spills, hot buffers |
| `multi-turn` | a closed loop of conversations that think | prefixes found, kept on the host, lost |

Every one has 320 requests in eight rounds of 40, so that its intervals are narrow and no mood of the machine
has a cell to itself. Their lengths and seeds are none of the calibration's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, closed_loop, conversations, poisson

from .errors import RealRunError
from .geometry import sliced_scenario

NUM_REQUESTS = 320
NUM_ROUNDS = 8
LEAST_OF_ROUND = 40
"""Requests: shorter rounds would be all beginning and end."""
LEAST_REQUESTS = 200
"""Cells of fewer are not judged."""
STEADY_LOAD = 0.6
TURNS = 4
POLICIES = ("gpu-only", "prefix-offload", "hybrid", "host-resident")
"""Of `make validate`."""


@dataclass(frozen=True)
class DeviceScale:
    """Sizes that suit a device: the scenario and the lengths of requests."""

    settings: tuple[str, ...]
    num_layers: int | None
    num_experts: int | None
    users: int
    pressure_gib: float
    """GPU pool under pressure: room for about half of the users."""
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    later_tokens: tuple[int, int]
    think_s: float


SCALES: Mapping[str, DeviceScale] = MappingProxyType(
    {
        "cpu": DeviceScale(
            settings=(
                "model.preset=tiny-dsa",
                "node.preset=h200x1",
                "parallel.tp=1",
                "kv.dtype=bf16",
                "kv.hot_rows=128",
                "kv.gpu_kv_gib=0.03",
                "kv.host_pool_gib=0.05",
                "kv.prefix_offload_gib=0.03",
                "scheduler.max_num_seqs=8",
                "scheduler.max_num_batched_tokens=256",
                "scheduler.max_model_len=512",
            ),
            num_layers=4,
            num_experts=None,
            users=8,
            pressure_gib=0.0098,
            input_tokens=(64, 256),
            output_tokens=(6, 16),
            later_tokens=(16, 64),
            think_s=0.05,
        ),
        "cuda": DeviceScale(
            settings=(
                "model.preset=glm-5.3",
                "model.weights=bf16",
                "node.preset=h200x1",
                "parallel.tp=1",
                "kv.gpu_kv_gib=6",
                "kv.host_pool_gib=24",
                "kv.prefix_offload_gib=8",
                "scheduler.max_num_seqs=32",
                "scheduler.max_num_batched_tokens=8192",
                "scheduler.max_model_len=65536",
            ),
            num_layers=8,
            num_experts=32,
            users=32,
            pressure_gib=3.0,
            input_tokens=(8_192, 40_960),
            output_tokens=(16, 64),
            later_tokens=(256, 2_048),
            think_s=0.05,
        ),
    }
)
"""The CPU plays four layers of tiny-dsa, a GPU eight layers of GLM-5.3 with 32 experts, of true geometry."""


@dataclass(frozen=True)
class Workload:
    """Requests and the scenario keys that go with them."""

    name: str
    settings: tuple[str, ...]
    make: Callable[[float, int], Trace]
    """The trace of a round, given the requests a second that the machine can do and the round's number."""
    num_rounds: int = 1
    follows_capacity: bool = False
    """Its arrivals depend on that capacity."""


def base_scenario(device: str, folder: Path) -> Scenario:
    """Change: the scenario of a device, its model slice written into ``folder``.

    Raises:
        RealRunError: an unknown device.
    """
    scale = _scale(device)
    return sliced_scenario(Scenario.load(None, scale.settings), scale.num_layers, scale.num_experts, folder)


def workloads(device: str, num_requests: int = NUM_REQUESTS) -> tuple[Workload, ...]:
    """Query: the three workloads of a device."""
    scale = _scale(device)
    rounds = min(max(num_requests // LEAST_OF_ROUND, 1), NUM_ROUNDS)
    count = -(-num_requests // rounds)
    sessions = max(count // TURNS, 1)
    loop = f"workload.concurrency={scale.users}"
    lengths = scale.input_tokens, scale.output_tokens
    return (
        Workload(
            "steady",
            (),
            lambda per_second, number: poisson(count, STEADY_LOAD * per_second, *lengths, _seed(1, number)),
            rounds,
            follows_capacity=True,
        ),
        Workload(
            "pressure",
            (loop, f"kv.gpu_kv_gib={scale.pressure_gib}"),
            lambda _, number: closed_loop(count, *lengths, seed=_seed(2, number)),
            rounds,
        ),
        Workload(
            "multi-turn",
            (loop, f"kv.gpu_kv_gib={2 * scale.pressure_gib}"),
            lambda _, number: conversations(
                sessions,
                TURNS,
                scale.input_tokens,
                scale.later_tokens,
                scale.output_tokens,
                think_s=scale.think_s,
                seed=_seed(3, number),
            ),
            rounds,
        ),
    )


def trace_workload(trace: Trace) -> Workload:
    """Query: a trace of the user's own, played as the scenario says."""
    return Workload(trace.name, (), lambda _, number: trace)


def _seed(workload: int, number: int) -> int:
    return 10 + workload + 1000 * number


def _scale(device: str) -> DeviceScale:
    if device not in SCALES:
        raise RealRunError(f"device {device!r} is unknown: known are {' and '.join(SCALES)}")
    return SCALES[device]
