"""How many requests fit at once: the published calculator's formula, and what vLLM 0.33 really admits.

Per replica, with P = pages of the context, G = resident groups, H = hot pages and N = usable blocks of the
packed pool (the null block left out):

| figure | formula |
|---|---|
| baseline | blocks of all layers / P, the calculator's and the engine's |
| hybrid | max(baseline, packed blocks / (P + G H + 2 G)), the calculator's; also host blocks / P |
| admission | 1 + (N - P - G min(P, cap)) / (P + G H + 2 G), also (host blocks - 1) / P; the engine's |

The calculator leaves out the admission window: a cold prompt must find room for up to `cap` resident pages in
all groups (cap = async_depth x max_num_batched_tokens / 64). That is 20 to 25 % fewer.

The *dead bands* are prompts below the window for which vLLM 0.33 never starts to offload: what n admitted
prompts leave free is at least the transition watermark (nobody is asked to read from the host) and less than
one more admission (nobody is let in).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from hisparsim.specs.budget import GpuBudget, gpu_budget
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.kv_layout import PAGE_TOKENS, KvLayout, RowFormat, auto_row_format, kv_layout, pages_of
from hisparsim.specs.models import ModelSpec
from hisparsim.specs.nodes import MemoryFigure, NodeSpec
from hisparsim.specs.setup import ACTIVE_TAIL_PAGES, MAX_HOT_ROWS, TRANSITION_POOL_SHARE
from hisparsim.specs.weights import GIB, WeightFormat

CALCULATOR_MAX_NUM_SEQS = 1024
MAX_HOST_GIB = 1e9
"""The calculator's limit for each replica."""


@dataclass(frozen=True)
class CapacityRow:
    """What fits at one context length: requests summed over replicas, host memory of one replica."""

    context_tokens: int
    gpu_kv_gib: float
    gpu_block_bytes: int
    host_block_bytes: int
    host_block_stride_bytes: int
    baseline_requests: int
    hybrid_requests: int
    min_host_gib: int
    """Host pool that the hybrid figure needs, whole GiB; 0 where offloading does not raise it."""
    admission_requests: int


@dataclass(frozen=True)
class DeadBand:
    """Prompt lengths, both ends included, of which vLLM 0.33 runs `requests` a replica and offloads none."""

    first_tokens: int
    last_tokens: int
    requests: int


@dataclass(frozen=True)
class CapacityCurves:
    """Requests that fit by context length, ready to draw; the three sequences match `context_tokens`."""

    context_tokens: tuple[int, ...]
    baseline_requests: tuple[int, ...]
    hybrid_requests: tuple[int, ...]
    admission_requests: tuple[int, ...]
    dead_bands: tuple[DeadBand, ...]


@dataclass(frozen=True)
class Capacity:
    """One configuration to count requests for.

    `row_format` None = by architecture; `host_gib` None = unlimited. Raises ScenarioError at construction for
    a value out of range, and WeightsDoNotFitError at the first count.
    """

    model: ModelSpec
    node: NodeSpec
    tp: int = 8
    dp: int = 1
    ep: bool = False
    row_format: RowFormat | None = None
    hot_rows: int = 4096
    host_gib: float | None = None
    weights: WeightFormat = WeightFormat.FP8
    memory: MemoryFigure = MemoryFigure.NOMINAL
    max_num_seqs: int = CALCULATOR_MAX_NUM_SEQS
    max_num_batched_tokens: int = 32_768
    async_depth: int = 2
    gpu_memory_utilization: float = 0.92
    runtime_reserve_gib: float = 15.0

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "max_num_seqs", "max_num_batched_tokens", "async_depth"):
            if getattr(self, name) < 1:
                raise ScenarioError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.model.num_heads % self.tp:
            raise ScenarioError(
                f"tp = {self.tp} does not divide the {self.model.num_heads} heads of {self.model.name}"
            )
        if not self.model.index_top_k <= self.hot_rows <= MAX_HOT_ROWS:
            raise ScenarioError(
                f"hot rows {self.hot_rows} are outside {self.model.index_top_k}..{MAX_HOT_ROWS}: at least "
                f"top_k of {self.model.name}, at most what 16-bit slots number"
            )
        if self.host_gib is not None and not 0 < self.host_gib <= MAX_HOST_GIB:
            raise ScenarioError(
                f"host memory {self.host_gib:g} GiB must be positive and at most {MAX_HOST_GIB:g}; leave "
                "it out for no limit"
            )

    # --- geometry ------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes of this kind that tp x dp GPUs take."""
        return -(-self.tp * self.dp // self.node.num_gpus)

    @cached_property
    def budget(self) -> GpuBudget:
        """The memory of one GPU."""
        return gpu_budget(
            self.model,
            self.node,
            weights=self.weights,
            memory=self.memory,
            tp=self.tp,
            dp=self.dp,
            ep=self.ep,
            gpu_memory_utilization=self.gpu_memory_utilization,
            runtime_reserve_gib=self.runtime_reserve_gib,
        )

    @cached_property
    def layout(self) -> KvLayout:
        """Blocks without an MTP layer, which the calculator does not model."""
        row_format = self.row_format or auto_row_format(self.node.architecture)
        return kv_layout(self.model, row_format)

    @property
    def host_block_stride_bytes(self) -> int:
        """Distance between host blocks; the local TP ranks of one node share a pool."""
        shared = 1 < self.tp <= self.node.num_gpus
        return self.layout.host_block_stride_bytes(shared_by_ranks=shared)

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the packed pool, the null block included."""
        return int(self.budget.gpu_kv_gib * GIB) // self.layout.gpu_block_bytes

    @property
    def hot_blocks(self) -> int:
        """Hot blocks one request leases."""
        return self.layout.num_groups * pages_of(self.hot_rows)

    @property
    def admission_cap_pages(self) -> int:
        """Resident pages a group reserves for a cold prompt at most."""
        return pages_of(self.async_depth * self.max_num_batched_tokens)

    @property
    def transition_watermark_blocks(self) -> int:
        """Free blocks below which vLLM 0.33 asks requests to read from the host."""
        return max(self.hot_blocks, self.num_gpu_blocks // TRANSITION_POOL_SHARE)

    # --- counts for one replica ----------------------------------------------------------------------

    def baseline_replica_requests(self, context_tokens: int) -> int:
        """Query: fully resident requests in a pool of whole pages."""
        blocks = int(self.budget.gpu_kv_gib * GIB) // self.layout.baseline_block_bytes
        return min(self.max_num_seqs, blocks // pages_of(context_tokens))

    def offloaded_replica_requests(self, context_tokens: int) -> int:
        """Query: requests that read from the host, by the calculator."""
        pages = pages_of(context_tokens)
        count = min(self.max_num_seqs, self.num_gpu_blocks // self._steady_blocks(pages))
        if self.host_gib is not None:
            host_blocks = int(self.host_gib * GIB) // self.layout.host_block_bytes
            count = min(count, host_blocks // pages)
        return count

    def admission_replica_requests(self, context_tokens: int) -> int:
        """Query: cold requests of one length that vLLM 0.33 runs at once, once all read from the host."""
        pages = pages_of(context_tokens)
        spare = self.num_gpu_blocks - 1 - self._admission_blocks(pages)
        count = min(self.max_num_seqs, 1 + spare // self._steady_blocks(pages)) if spare >= 0 else 0
        if self.host_gib is not None:
            host_blocks = int(self.host_gib * GIB) // self.host_block_stride_bytes
            count = min(count, max(host_blocks - 1, 0) // pages)
        return count

    def dead_band_requests(self, context_tokens: int) -> int | None:
        """Query: requests that run in a dead band; None where this length lies outside of all."""
        pages = pages_of(context_tokens)
        if pages >= self.admission_cap_pages:
            return None
        usable = self.num_gpu_blocks - 1
        count = usable // self._admission_blocks(pages)
        free = usable - count * self._admission_blocks(pages)
        return count if count and free >= self.transition_watermark_blocks else None

    def _steady_blocks(self, pages: int) -> int:
        return pages + self.hot_blocks + self.layout.num_groups * ACTIVE_TAIL_PAGES

    def _admission_blocks(self, pages: int) -> int:
        return pages + self.layout.num_groups * min(pages, self.admission_cap_pages)

    # --- results -------------------------------------------------------------------------------------

    def row(self, context_tokens: int) -> CapacityRow:
        """Query: what fits at one context length; ScenarioError where the model has no such length."""
        if not 1 <= context_tokens <= self.model.max_position_embeddings:
            raise ScenarioError(
                f"context of {context_tokens} tokens is outside 1..{self.model.max_position_embeddings}, the "
                f"positions of {self.model.name}"
            )
        baseline = self.baseline_replica_requests(context_tokens)
        offloaded = self.offloaded_replica_requests(context_tokens)
        host_bytes = offloaded * pages_of(context_tokens) * self.layout.host_block_bytes
        return CapacityRow(
            context_tokens=context_tokens,
            gpu_kv_gib=self.budget.gpu_kv_gib,
            gpu_block_bytes=self.layout.gpu_block_bytes,
            host_block_bytes=self.layout.host_block_bytes,
            host_block_stride_bytes=self.host_block_stride_bytes,
            baseline_requests=self.dp * baseline,
            hybrid_requests=self.dp * max(baseline, offloaded),
            min_host_gib=-(-host_bytes // GIB) if offloaded > baseline else 0,
            admission_requests=self.dp * self.admission_replica_requests(context_tokens),
        )

    def rows(self, contexts: Iterable[int]) -> tuple[CapacityRow, ...]:
        """Query: one row for each context length, in the given order."""
        return tuple(self.row(context) for context in contexts)

    def dead_bands(self) -> tuple[DeadBand, ...]:
        """Query: all dead bands, by ascending prompt length."""
        return tuple(self._dead_bands())

    def _dead_bands(self) -> Iterator[DeadBand]:
        start, count = 0, None
        for pages in range(1, self.admission_cap_pages + 1):
            here = self.dead_band_requests(pages * PAGE_TOKENS)
            if here != count:
                if count is not None:
                    yield DeadBand(start * PAGE_TOKENS + 1, (pages - 1) * PAGE_TOKENS, count)
                start, count = pages - 1, here

    def curves(self, *, num_points: int = 240, first_tokens: int = 4096) -> CapacityCurves:
        """Query: the three counts over context lengths evenly spaced in their logarithm."""
        last = self.model.max_position_embeddings
        ratio = last / first_tokens
        contexts = sorted({round(first_tokens * ratio ** (i / (num_points - 1))) for i in range(num_points)})
        rows = self.rows(contexts)
        return CapacityCurves(
            context_tokens=tuple(contexts),
            baseline_requests=tuple(row.baseline_requests for row in rows),
            hybrid_requests=tuple(row.hybrid_requests for row in rows),
            admission_requests=tuple(row.admission_requests for row in rows),
            dead_bands=self.dead_bands(),
        )

    def as_dict(self, contexts: Iterable[int]) -> dict[str, object]:
        """Query: the JSON object of `hisparsim capacity --json`: rows, assumptions and dead bands."""
        return {
            "rows": [asdict(row) for row in self.rows(contexts)],
            "assumptions": self.assumptions(),
            "dead_bands": [asdict(band) for band in self.dead_bands()],
        }

    def assumptions(self) -> dict[str, object]:
        """Query: what the counts rest on, the memory figure included."""
        return {
            "model": self.model.name,
            "weights": self.weights.value,
            "node": self.node.name,
            "num_nodes": self.num_nodes,
            "tp": self.tp,
            "dp": self.dp,
            "ep": self.ep,
            "node_memory": self.memory.value,
            "gpu_memory_gib": round(self.budget.memory_gib, 2),
            "weights_gib_per_gpu": round(self.budget.weights_gib, 2),
            "row_format": self.layout.row_format.value,
            "row_bytes": self.layout.row_bytes,
            "num_groups": self.layout.num_groups,
            "hot_rows": self.hot_rows,
            "host_gib": self.host_gib,
            "max_num_seqs": self.max_num_seqs,
            "max_in_flight_tokens": self.async_depth * self.max_num_batched_tokens,
        }
