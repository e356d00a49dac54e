"""A node: its GPUs, their links to the host, and the host's memory.

Rates are bytes a second. PCIe rates are per GPU and measured where a measurement is published, not nominal.
The sources of all figures stand in the preset files.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.models import preset_error
from hisparsim.specs.presets import PresetKind, load_preset, preset_names

Rate = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Architecture(Enum):
    """GPU architecture, as far as it decides the KV row format."""

    HOPPER = "sm90"
    BLACKWELL = "sm100"
    BLACKWELL_ULTRA = "sm103"
    BLACKWELL_RTX = "sm120"


class MemoryFigure(Enum):
    """Which figure of the GPU's memory a calculation takes."""

    NOMINAL = "nominal"
    """The round figure of the datasheet or of the published calculator."""
    REPORTED = "reported"
    """What the device reports (`nvidia-smi`), of which the engine takes its share."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkRates(_Frozen):
    """Rates of one GPU's PCIe link by direction."""

    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate


class CopyMode(_Frozen):
    """What one GPU's link gives to one way of copying, in four situations."""

    alone: LinkRates
    """One GPU copies, in one direction."""
    alone_duplex: LinkRates
    """One GPU copies in both directions at once."""
    all_gpus: LinkRates
    """All GPUs of the node copy in the same direction; the rate is per GPU."""
    all_gpus_duplex: LinkRates
    """All GPUs copy in both directions at once; the rate is per GPU."""


class Pcie(_Frozen):
    """The host link of each GPU."""

    nominal_bytes_per_s: Rate
    """One direction, by the bus standard; no copy reaches it."""
    copy_engine: CopyMode
    """DMA copies of large pieces."""
    kernel: CopyMode
    """Copies by GPU kernels from mapped host memory: the ceiling of a row gather."""
    host_read_latency_s: Rate
    """One dependent read of host memory on the GPU's own socket."""
    remote_host_read_latency_s: Rate
    """The same across the socket link; equal to the local one on one socket."""


class PeakFlops(_Frozen):
    """Dense tensor-core peaks of one GPU, FLOP/s; None where the format has no hardware."""

    bf16: Rate
    fp8: Rate
    fp4: Rate | None = None


class NodeSpec(_Frozen):
    """One node. `num_gpus` GPUs of one kind, `num_sockets` CPU sockets."""

    name: str
    gpu_name: str
    architecture: Architecture
    num_gpus: Count
    num_sms: Count
    nominal_memory_bytes: Count
    """Of one GPU."""
    reported_memory_bytes: Count
    """Of one GPU."""
    hbm_bytes_per_s: Rate
    peak_flops: PeakFlops
    nvlink_bytes_per_s: Rate | None = None
    """Of one GPU, each way; None where GPUs talk over PCIe."""
    pcie: Pcie
    num_sockets: Count
    host_dram_bytes: Count
    """Of the whole node."""
    host_dram_bytes_per_s: Rate
    """Of the whole node, by its DIMMs; a copy gets less."""
    socket_link_bytes_per_s: Rate | None = None
    """Between the two sockets, each way; None on one socket."""

    def gpu_memory_bytes(self, figure: MemoryFigure) -> int:
        """Query: the memory of one GPU by the chosen figure."""
        return self.nominal_memory_bytes if figure is MemoryFigure.NOMINAL else self.reported_memory_bytes

    @property
    def gpus_per_socket(self) -> int:
        """GPUs attached to one socket, rounded up."""
        return -(-self.num_gpus // self.num_sockets)


def node_names() -> tuple[str, ...]:
    """Query: the names of the bundled nodes."""
    return preset_names(PresetKind.NODE)


def load_node(name: str) -> NodeSpec:
    """Query: the node preset called `name`, or the one in a file where `name` ends in `.toml`.

    Raises UnknownNameError (with the known names) or ScenarioError where the file is not a node.
    """
    preset = load_preset(PresetKind.NODE, name)
    try:
        return NodeSpec.model_validate(preset.values)
    except ValidationError as error:
        raise ScenarioError(preset_error("node", name, error)) from None
