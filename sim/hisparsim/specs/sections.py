"""The sections of a scenario file, one class each, every key with its unit, default and meaning."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hisparsim.specs.nodes import MemoryFigure
from hisparsim.specs.weights import WeightFormat

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gib = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0.001)]
"""GB/s, at least a megabyte a second; `inf` stands for a free link."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KvDtype(Enum):
    """Row format of the latent KV; `auto` follows the architecture."""

    AUTO = "auto"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"
    BF16 = "bf16"
    NVFP4 = "nvfp4"


class HostPlacement(Enum):
    """Where pinned host memory lies relative to the GPU that reads it."""

    LOCAL = "local"
    """On the GPU's own socket."""
    INTERLEAVED = "interleaved"
    """Page by page over both sockets: half of all bytes cross the socket link."""
    ONE_SOCKET = "one-socket"
    """All on socket 0: everything that the other socket's GPUs move crosses the link."""


class CostSource(Enum):
    """Where step times come from."""

    ROOFLINE = "roofline"
    MEASURED = "measured"
    CALIBRATION = "calibration"


class OverLength(Enum):
    """What happens to a request longer than the window."""

    REJECT = "reject"
    SKIP = "skip"
    TRUNCATE = "truncate"


class Section(BaseModel):
    """A frozen section that knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Query: the value; a TOML `true` is no number."""
        field = cls.model_fields[info.field_name] if info.field_name else None
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise ValueError("input should not be true or false")
        return value


class ModelSection(Section):
    """Which model, and how its weights are stored."""

    preset: Annotated[str, Field(description="name of a model preset, or a path that ends in .toml")] = (
        "glm-5.3"
    )
    weights: Annotated[WeightFormat, Field(description="weight format; sets the weight bytes")] = (
        WeightFormat.FP8
    )


class NodeSection(Section):
    """Which node, and which of its figures."""

    preset: Annotated[str, Field(description="name of a node preset, or a path that ends in .toml")] = (
        "h200x8"
    )
    memory: Annotated[
        MemoryFigure, Field(description="GPU memory: what the device reports, or the nominal figure")
    ] = MemoryFigure.REPORTED
    host_placement: Annotated[
        HostPlacement, Field(description="where pinned host memory lies relative to the GPU that reads it")
    ] = HostPlacement.LOCAL


class ParallelSection(Section):
    """How the model is spread over GPUs."""

    tp: Annotated[Count, Field(description="tensor parallel ranks; KV is replicated on each")] = 8
    dp: Annotated[
        Count, Field(description="data parallel attention replicas, each with its own KV pools")
    ] = 1
    ep: Annotated[bool, Field(description="routed experts sharded over tp x dp instead of tp")] = False


class KvSection(Section):
    """The KV pools on the GPU and in host memory."""

    dtype: Annotated[KvDtype, Field(description="row format; auto follows the GPU architecture")] = (
        KvDtype.AUTO
    )
    hot_rows: Annotated[
        Count | None,
        Field(description="hot buffer rows a request; null = (query_len + 1) x top_k, the engine's rule"),
    ] = None
    host_pool_gib: Annotated[
        Gib | None,
        Field(
            description="host pool of one DP replica, GiB; null = 384, less where the node's DRAM is small"
        ),
    ] = None
    prefix_offload_gib: Annotated[
        Gib | None,
        Field(description="ordinary offload tier of one DP replica, GiB; null = 512, less on a small node"),
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Field(gt=0, le=1)],
        Field(description="share of the GPU memory that the engine takes"),
    ] = 0.92
    runtime_reserve_gib: Annotated[
        Annotated[float, Field(ge=0)], Field(description="GiB of a GPU that are neither weights nor KV")
    ] = 15.0
    gpu_kv_gib: Annotated[
        Gib | None,
        Field(description="GiB of KV a GPU, from an engine's start-up log; replaces the computed budget"),
    ] = None
    num_gpu_blocks: Annotated[
        Annotated[int, Field(ge=2)] | None,
        Field(description="GPU blocks from an engine's start-up log, in blocks of the policy that runs"),
    ] = None
    prefix_caching: Annotated[bool, Field(description="cached prefixes are found and reused")] = True


class SchedulerSection(Section):
    """Limits of the continuous batching scheduler."""

    max_num_seqs: Annotated[Count, Field(description="running requests of one replica")] = 256
    max_num_batched_tokens: Annotated[Count, Field(description="tokens of one step")] = 32_768
    max_model_len: Annotated[Count, Field(description="window: prompt and output tokens of one request")] = (
        142_000
    )
    async_depth: Annotated[
        Annotated[int, Field(ge=1, le=2)],
        Field(description="steps open at once: 2 = asynchronous scheduling, 1 = synchronous"),
    ] = 2
    watermark: Annotated[Share, Field(description="share of the GPU pool that admission keeps free")] = 0.0


class PolicySection(BaseModel):
    """The residency policy and its own switches (`policy.*`)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Annotated[str, Field(description="name of a policy, or path/to/file.py:Class")] = "hybrid"

    @property
    def options(self) -> dict[str, Any]:
        """The policy's own switches, as given."""
        return dict(self.__pydantic_extra__ or {})


class SpeculationSection(Section):
    """Draft tokens by the MTP layer."""

    draft_tokens: Annotated[
        Annotated[int, Field(ge=0)], Field(description="draft tokens a step; 0 = none")
    ] = 0
    acceptance: Annotated[
        Share,
        Field(
            description="probability that a draft is accepted when the one before it was; 0.965 gives 3.8 "
            "tokens a step at three drafts, as the published c1 point implies"
        ),
    ] = 0.965


class CostSection(Section):
    """How long a step takes."""

    source: Annotated[
        CostSource, Field(description="where step times come from: roofline, or calibration:FILE")
    ] = CostSource.ROOFLINE
    calibration: Annotated[
        str | None, Field(description="file of hisparsim calibrate; set by cost.source=calibration:FILE")
    ] = None
    resolve_us: Annotated[
        Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None,
        Field(description="one residency resolve of one indexer layer, us; null = the source's figure"),
    ] = None
    front_end: Annotated[
        bool,
        Field(description="requests pass a serial front end (HTTP, template, tokeniser) before the queue"),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _take_file_from_source(cls, values: Any) -> Any:
        """Query: `source = "calibration:FILE"` taken apart into the source and its file."""
        source = values.get("source") if isinstance(values, dict) else None
        if not isinstance(source, str) or not source.startswith(f"{CostSource.CALIBRATION.value}:"):
            return values
        kind, _, file = source.partition(":")
        return {**values, "source": kind, "calibration": file or None}

    @model_validator(mode="after")
    def _file_has_an_effect(self) -> CostSection:
        """Query: this section; a calibration that nothing would read is refused."""
        if self.calibration is not None and "source" not in self.model_fields_set:
            raise ValueError(
                f"cost.calibration alone has no effect: give cost.source=calibration:{self.calibration}"
            )
        return self


class LinksSection(Section):
    """Overrides of the node's host links in GB/s; null = the node preset's rate, inf = free."""

    h2d_gb_per_s: Annotated[Rate | None, Field(description="host to device, copy engine")] = None
    d2h_gb_per_s: Annotated[Rate | None, Field(description="device to host, copy engine")] = None
    gather_gb_per_s: Annotated[Rate | None, Field(description="row gather by kernels from host memory")] = (
        None
    )
    host_dram_gb_per_s: Annotated[Rate | None, Field(description="host memory of the node")] = None
    overlap: Annotated[
        Share, Field(description="share of the transfers that could hide behind compute and does")
    ] = 1.0
    socket_gb_per_s: Annotated[Rate | None, Field(description="link between the sockets, each way")] = None


class LocalitySection(Section):
    """How the selected rows move from step to step."""

    profile: Annotated[str, Field(description="name of a locality profile, or a path to one")] = "glm-5.1"


class WorkloadSection(Section):
    """How the trace is played."""

    time_scale: Annotated[
        PositiveFloat, Field(description="multiplies arrival times: 0.5 doubles the rate")
    ] = 1.0
    limit: Annotated[Count | None, Field(description="first requests of the trace only")] = None
    concurrency: Annotated[
        Count | None, Field(description="closed loop with this many users; null = open loop")
    ] = None
    rate_per_s: Annotated[
        PositiveFloat | None,
        Field(description="arrivals redrawn as a Poisson process of this rate; null = as in the trace"),
    ] = None
    warmup_s: Annotated[
        Seconds, Field(description="requests that arrive before this are left out of the metrics")
    ] = 0.0
    over_length: Annotated[OverLength, Field(description="requests longer than the window")] = (
        OverLength.REJECT
    )


class SloSection(Section):
    """What a request must meet to count as good; null = not asked."""

    ttft_s: Annotated[PositiveFloat | None, Field(description="time to first token, seconds")] = None
    tpot_s: Annotated[PositiveFloat | None, Field(description="time per output token, seconds")] = None
    e2e_s: Annotated[PositiveFloat | None, Field(description="whole request, seconds")] = None
