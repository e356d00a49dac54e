"""The named terms of a step, and the keys of the figures that each rests on."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType


class Term(StrEnum):
    """A part of a step's time; the values are the names in results."""

    __hash__ = str.__hash__  # an Enum's own is a Python call, and steps look terms up by the million

    DECODE_PROJECTIONS = "decode_projections"
    DECODE_INDEXER = "decode_indexer"
    """Index logits over the context and top-k, in layers that own an indexer. Not sharded by TP."""
    DECODE_SPARSE = "decode_sparse_attention"
    ATTENTION_LATENCY = "attention_latency"
    """What decode attention takes beyond bytes and FLOPs: many small kernels a layer."""
    DRAFTS = "drafts"
    PREFILL_PROJECTIONS = "prefill_projections"
    PREFILL_INDEXER = "prefill_indexer"
    PREFILL_SPARSE = "prefill_sparse_attention"
    MOE = "moe"
    SHARED_EXPERT = "shared_expert"
    """Eager steps only: inside a graph it runs beside the routed experts."""
    DENSE_MLP = "dense_mlp"
    ALL_REDUCE = "all_reduce"
    """All-reduces, and under EP over replicas the exchanges of tokens with their experts."""
    ROUTER = "router"
    NORMS = "norms"
    SAMPLING = "sampling"
    LAUNCH = "launch"
    """Eager steps: what the modules' launch times exceed their GPU work by."""
    RESOLVE = "resolve"
    HOT_GATHER = "hot_gather"
    """Missed rows read from the host, the part that compute does not hide."""
    STAGING = "staging"
    """Earlier context that prefill reads from the host, the part that compute does not hide."""
    MIRROR = "mirror"
    """Rows copied to the host in the step, the part that outlasts the rest of it."""


_PEAKS = ("efficiency.hbm", "efficiency.gemm_flops_fp8")

TERM_SOURCES = MappingProxyType(
    {
        Term.DECODE_PROJECTIONS: _PEAKS,
        Term.DECODE_INDEXER: ("top_k_latency_us.growth", "efficiency.index_keys_hbm"),
        Term.DECODE_SPARSE: ("efficiency.sparse_decode_flops", "efficiency.sparse_decode_hbm"),
        Term.ATTENTION_LATENCY: (
            "layer_us.attention_with_indexer",
            "layer_us.attention_without_indexer",
        ),
        Term.DRAFTS: ("layers.draft_us",),
        Term.PREFILL_PROJECTIONS: ("efficiency.gemm_flops_fp8",),
        Term.PREFILL_INDEXER: ("efficiency.index_prefill_flops",),
        Term.PREFILL_SPARSE: ("efficiency.sparse_prefill_flops", "layers.padded_heads"),
        Term.MOE: ("layer_us.moe", "efficiency.moe_hbm", "efficiency.moe_flops"),
        Term.SHARED_EXPERT: ("layers.shared_expert_us",),
        Term.DENSE_MLP: ("layers.dense_mlp_us",),
        Term.ALL_REDUCE: ("all_reduce_us.value",),
        Term.ROUTER: ("layers.router_us",),
        Term.NORMS: ("layers.norm_us",),
        Term.SAMPLING: ("layers.sampling_us",),
        Term.LAUNCH: ("eager_us.attention", "eager_us.moe", "eager_us.all_reduce"),
        Term.RESOLVE: ("resolve.call_us", "resolve.query_us"),
        Term.HOT_GATHER: (),
        Term.STAGING: (),
        Term.MIRROR: (),
    }
)
