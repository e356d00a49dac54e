"""Bytes and FLOPs that one GPU does in each module of one layer, from the model's geometry.

Attention is sharded by TP over the heads (the low-rank projections and the indexer are replicated), the
sparse attention kernel works on heads padded to a multiple of 64. Routed experts are sharded by TP, under EP
by TP x DP; the shared expert and dense layers by TP. A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsim.specs.models import ModelSpec
from hisparsim.specs.weights import WeightFormat, expert_bytes_per_expert

_BF16_BYTES = 2


def stored_bytes_per_element(weights: WeightFormat) -> float:
    """Query: bytes of one weight element outside the experts (quarter-byte formats keep those in fp8)."""
    return 2.0 if weights is WeightFormat.BF16 else 1.0 + 4.0 / 128**2


@dataclass(frozen=True)
class LayerWork:
    """Work of one GPU in one layer: bytes are read once a step, FLOPs are for one token."""

    projection_bytes: float
    projection_flops: float
    indexer_bytes: float
    indexer_flops: float
    index_key_flops: float
    """For one pair of a query token and a past token."""
    sparse_flops_per_row: float
    """For one selected row, all padded heads."""
    expert_bytes: float
    """Of one distinct expert: its share on this GPU (under EP: one of this GPU's experts, whole)."""
    expert_share: float
    """Share of all distinct experts that this GPU reads."""
    routed_flops: float
    """For one token of those that the expert layers see."""
    shared_expert_bytes: float
    shared_expert_flops: float
    dense_bytes: float
    dense_flops: float
    router_bytes: float
    router_flops: float
    head_bytes: float
    head_flops: float
    """Of the output head, for one sampled token."""


def layer_work(
    model: ModelSpec, weights: WeightFormat, *, tp: int, dp: int, ep: bool, padded_heads: int
) -> LayerWork:
    """Query: the work of one GPU in a layer of `model` under a parallelism."""
    hidden = model.hidden_size
    heads = model.num_heads / tp
    padded = -(-model.num_heads // tp // padded_heads) * padded_heads
    stored = stored_bytes_per_element(weights)
    low_rank = hidden * (model.q_lora_rank + model.latent_size)
    per_head = model.q_lora_rank * model.qk_head_dim + hidden * model.v_head_dim
    absorbed = model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim)
    quantised = low_rank + heads * per_head
    index_query = model.q_lora_rank * model.index_num_heads * model.index_head_dim
    index_other = hidden * (model.index_head_dim + model.index_num_heads)
    mlp = 3 * hidden
    num_gpus = tp * dp if ep else tp
    expert_bytes = float(expert_bytes_per_expert(model, weights))
    shared = mlp * model.moe_intermediate_size * model.num_shared_experts / tp
    dense = mlp * model.dense_intermediate_size / tp
    router = hidden * model.num_routed_experts
    head = hidden * model.vocab_size / tp
    return LayerWork(
        projection_bytes=quantised * stored + heads * absorbed * _BF16_BYTES,
        projection_flops=2.0 * (quantised + heads * absorbed),
        indexer_bytes=(index_query + index_other) * stored,
        indexer_flops=2.0 * (index_query + index_other),
        index_key_flops=2.0 * model.index_num_heads * model.index_head_dim,
        sparse_flops_per_row=2.0 * padded * (model.latent_size + model.kv_lora_rank),
        expert_bytes=expert_bytes if ep else expert_bytes / tp,
        expert_share=1.0 / num_gpus if ep else 1.0,
        routed_flops=2.0 * mlp * model.moe_intermediate_size * model.num_experts_per_token / num_gpus,
        shared_expert_bytes=shared * stored,
        shared_expert_flops=2.0 * shared,
        dense_bytes=dense * stored,
        dense_flops=2.0 * dense,
        router_bytes=float(router * _BF16_BYTES),
        router_flops=2.0 * router,
        head_bytes=head * _BF16_BYTES,
        head_flops=2.0 * head,
    )
