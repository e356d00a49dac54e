"""What the serving core and the clock need of a scenario: plain numbers, nothing left to look up.

`ServingSetup` describes one DP replica. Two kinds of GPU pool exist: *packed* (HiSparse: indexer, resident
and hot pages of equal blocks) and *whole* (one block holds a page of all layers and indexers: gpu-only and
prefix-offload). Block 0 of a pool is vLLM's null block, so one block less than counted is usable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hisparsim.specs.budget import gpu_budget
from hisparsim.specs.errors import PoolTooSmallError, ScenarioError
from hisparsim.specs.kv_layout import PAGE_TOKENS, KvLayout, kv_layout, pages_of
from hisparsim.specs.weights import GIB

if TYPE_CHECKING:
    from hisparsim.specs.scenario import Scenario

ACTIVE_TAIL_PAGES = 2
"""Newest pages of a request that stay pinned on the GPU (vLLM 0.33)."""
TRANSITION_POOL_SHARE = 10
"""The transition watermark is at least one block in ten of the pool (vLLM 0.33)."""
MAX_HOT_ROWS = 32_768
"""Hot slots are numbered in 16 bits (vLLM 0.33 and SGLang)."""
MAX_HOST_DRAM_SHARE = 0.95
"""vLLM refuses host pools beyond this share of the available memory."""


class PoolKind(Enum):
    """How a policy lays KV out on the GPU."""

    PACKED = "packed"
    WHOLE = "whole"


@dataclass(frozen=True)
class ServingSetup:
    """Geometry and limits of one DP replica, in the units of the names; GPU bytes are those of one GPU."""

    pool: PoolKind
    page_tokens: int
    row_bytes: int
    num_layers: int
    """Layers that store KV."""
    num_indexers: int
    index_row_bytes: int
    top_k: int
    group_num_layers: tuple[int, ...]
    """Layers in each resident group; one entry in a whole pool."""

    num_gpu_blocks: int
    gpu_block_bytes: int
    hot_rows: int
    """Rows of a request's hot buffer, the newest token's slot included; 0 in a whole pool."""
    baseline_num_blocks: int
    """Blocks of the whole pool that the same memory makes."""
    baseline_block_bytes: int

    num_host_blocks: int
    host_block_bytes: int
    host_block_stride_bytes: int
    host_pool_shared: bool
    """Local TP ranks share one host pool; otherwise each rank has its own."""
    prefix_offload_bytes_per_rank: int
    """Ordinary KV offload copies KV for each rank, so a rank gets its share of the tier."""
    num_prefix_offload_blocks: int
    """Pages of all layers and indexers in that share."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    async_depth: int
    scheduler_watermark: float
    """Share of the pool that admission keeps free."""
    prefix_caching: bool
    draft_tokens: int

    tp: int
    dp: int
    ep: bool

    @property
    def num_resident_groups(self) -> int:
        """G: resident groups, and as many hot ones in a packed pool."""
        return len(self.group_num_layers)

    @property
    def indexer_blocks_per_page(self) -> int:
        """Blocks a page's index keys take of their own: one in a packed pool, none in a whole one."""
        return 1 if self.pool is PoolKind.PACKED else 0

    @property
    def blocks_per_full_page(self) -> int:
        """Blocks of one page that is fully resident, its index keys included."""
        return self.num_resident_groups + self.indexer_blocks_per_page

    @property
    def num_usable_gpu_blocks(self) -> int:
        """GPU blocks without the null block."""
        return self.num_gpu_blocks - 1

    @property
    def num_usable_host_blocks(self) -> int:
        """Host blocks without the null block."""
        return max(self.num_host_blocks - 1, 0)

    @property
    def hot_pages_per_group(self) -> int:
        """Hot pages a request leases in each group."""
        return pages_of(self.hot_rows)

    @property
    def hot_blocks_per_request(self) -> int:
        """Hot blocks a request leases in all groups."""
        return self.num_resident_groups * self.hot_pages_per_group

    @property
    def query_len(self) -> int:
        """Tokens of one decode: the next one and the drafts."""
        return 1 + self.draft_tokens

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens of all steps that can be open at once."""
        return self.async_depth * self.max_num_batched_tokens

    @property
    def admission_cap_pages(self) -> int:
        """Resident pages a group reserves at admission: at most what can be in flight (vLLM 0.33)."""
        return pages_of(min(self.max_in_flight_tokens, self.max_model_len))

    @property
    def transition_watermark_blocks(self) -> int:
        """Free blocks below which requests are asked to read from the host (vLLM 0.33); 0 in a whole pool."""
        if self.pool is PoolKind.WHOLE:
            return 0
        return max(self.hot_blocks_per_request, self.num_gpu_blocks // TRANSITION_POOL_SHARE)

    @property
    def max_pages_per_request(self) -> int:
        """Pages of a request as long as the window."""
        return pages_of(self.max_model_len)

    @property
    def full_row_bytes(self) -> int:
        """Bytes of one token's rows in all layers."""
        return self.num_layers * self.row_bytes

    @property
    def gpu_pool_bytes(self) -> int:
        """Bytes of the GPU pool."""
        return self.num_gpu_blocks * self.gpu_block_bytes

    def admission_blocks(self, prompt_tokens: int) -> int:
        """Query: usable blocks that admission of a whole cold prompt asks for (vLLM 0.33)."""
        pages = pages_of(prompt_tokens)
        resident = pages if self.pool is PoolKind.WHOLE else min(pages, self.admission_cap_pages)
        return self.indexer_blocks_per_page * pages + self.num_resident_groups * resident

    def steady_blocks(self, tokens: int) -> int:
        """Query: blocks that a request of `tokens` tokens pins once all of it can be read from the host."""
        if self.pool is PoolKind.WHOLE:
            return pages_of(tokens)
        tail = self.num_resident_groups * ACTIVE_TAIL_PAGES
        return pages_of(tokens) + self.hot_blocks_per_request + tail


def build_setup(scenario: Scenario, pool: PoolKind) -> ServingSetup:
    """Query: the setup of one replica of `scenario` for policies that use `pool`.

    Raises ScenarioError (hot rows, host memory), WeightsDoNotFitError or PoolTooSmallError.
    """
    model, node = scenario.model_spec, scenario.node_spec
    kv, parallel, scheduler = scenario.kv, scenario.parallel, scenario.scheduler
    layout = kv_layout(model, scenario.row_format, with_mtp=scenario.speculation.draft_tokens > 0)
    packed = pool is PoolKind.PACKED
    block_bytes = layout.gpu_block_bytes if packed else layout.baseline_block_bytes
    num_gpu_blocks = kv.num_gpu_blocks
    if num_gpu_blocks is None:
        num_gpu_blocks = int(gpu_kv_gib(scenario) * GIB) // block_bytes
    gpu_memory_bytes = node.gpu_memory_bytes(scenario.node.memory)
    if kv.num_gpu_blocks is None and num_gpu_blocks * block_bytes > gpu_memory_bytes:
        raise ScenarioError(
            f"kv.gpu_kv_gib = {gpu_kv_gib(scenario):g} is more than the {gpu_memory_bytes / GIB:.1f} GiB of "
            f"a {node.gpu_name}"
        )
    if num_gpu_blocks * block_bytes > gpu_memory_bytes:
        raise ScenarioError(
            f"kv.num_gpu_blocks = {num_gpu_blocks} blocks of {block_bytes} bytes ({pool.value} pool) are "
            f"more than the {gpu_memory_bytes / GIB:.1f} GiB of a {node.gpu_name}; it counts blocks of the "
            "policy that runs: give kv.gpu_kv_gib where policies with different blocks share a scenario"
        )
    shared = parallel.tp > 1 and parallel.tp <= node.num_gpus
    stride = layout.host_block_stride_bytes(shared_by_ranks=shared)
    offload_bytes_per_rank = int(scenario.prefix_offload_gib * GIB) // parallel.tp
    setup = ServingSetup(
        pool=pool,
        page_tokens=PAGE_TOKENS,
        row_bytes=layout.row_bytes,
        num_layers=layout.num_layers,
        num_indexers=layout.num_indexers,
        index_row_bytes=layout.index_row_bytes,
        top_k=model.index_top_k,
        group_num_layers=layout.group_num_layers if packed else (layout.num_layers,),
        num_gpu_blocks=num_gpu_blocks,
        gpu_block_bytes=block_bytes,
        hot_rows=scenario.hot_rows if packed else 0,
        baseline_num_blocks=num_gpu_blocks * block_bytes // layout.baseline_block_bytes,
        baseline_block_bytes=layout.baseline_block_bytes,
        num_host_blocks=int(scenario.host_pool_gib * GIB) // stride,
        host_block_bytes=layout.host_block_bytes,
        host_block_stride_bytes=stride,
        host_pool_shared=shared,
        prefix_offload_bytes_per_rank=offload_bytes_per_rank,
        num_prefix_offload_blocks=offload_bytes_per_rank // layout.baseline_block_bytes,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        async_depth=scheduler.async_depth,
        scheduler_watermark=scheduler.watermark,
        prefix_caching=kv.prefix_caching,
        draft_tokens=scenario.speculation.draft_tokens,
        tp=parallel.tp,
        dp=parallel.dp,
        ep=parallel.ep,
    )
    _require_pools(setup, layout)
    return setup


def gpu_kv_gib(scenario: Scenario) -> float:
    """Query: GiB of KV on one GPU: the override where one is given, else the budget's figure."""
    if scenario.kv.gpu_kv_gib is not None:
        return scenario.kv.gpu_kv_gib
    return gpu_budget(
        scenario.model_spec,
        scenario.node_spec,
        weights=scenario.model.weights,
        memory=scenario.node.memory,
        tp=scenario.parallel.tp,
        dp=scenario.parallel.dp,
        ep=scenario.parallel.ep,
        gpu_memory_utilization=scenario.kv.gpu_memory_utilization,
        runtime_reserve_gib=scenario.kv.runtime_reserve_gib,
    ).gpu_kv_gib


def _require_pools(setup: ServingSetup, layout: KvLayout) -> None:
    """Raise PoolTooSmallError where a pool cannot hold even one page of one request."""
    least = setup.steady_blocks(1) if setup.pool is PoolKind.PACKED else 1
    if setup.num_usable_gpu_blocks < least:
        what = f"a hot region of {setup.hot_rows} rows and two pages" if least > 1 else "one page"
        raise PoolTooSmallError(
            f"the GPU pool of {setup.num_gpu_blocks} blocks of {setup.gpu_block_bytes} bytes cannot hold one "
            f"request: {what} need {least} blocks beside the null block; lower kv.hot_rows or "
            "give KV more memory"
        )
    if setup.pool is PoolKind.PACKED and setup.num_usable_host_blocks < 1:
        raise PoolTooSmallError(
            f"the host pool holds {setup.num_host_blocks} blocks of {setup.host_block_stride_bytes} bytes "
            f"({layout.num_layers} layers of 64 tokens), at least 2 are needed; raise kv.host_pool_gib"
        )
