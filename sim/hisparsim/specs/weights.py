"""Weight bytes of a model from its geometry, and how parallelism shards them.

Formats (stored bytes of a projection of n x k elements):

| format | routed experts | shared part: attention, indexer, dense and shared MLPs |
|---|---|---|
| fp8 | n k + 4 bytes per 128 x 128 block | the same |
| nvfp4 | n k / 2 + n k / 16 (one fp8 scale per 16 elements) | as fp8 (GLM-5.3-FP8-NVFP4 checkpoint) |
| w4a8 | n k / 2 + 2 bytes per 128 elements (group size assumed) | as fp8 (assumed) |
| bf16 | 2 n k | the same |

Embedding, output head, router, the indexer's head weights, the MTP projection and all norms are bf16 in
every format (router bias fp32). For GLM-5.3 in fp8 this gives 684.167 GiB of routed experts and 19.556 GiB
of shared weights, the two figures of vLLM's published concurrency calculator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hisparsim.specs.models import ModelSpec

GIB = 2**30
_BF16 = 2
_FP32 = 4
_FP8_BLOCK = 128


class WeightFormat(Enum):
    """How the weights are stored."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"
    W4A8 = "w4a8"
    BF16 = "bf16"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a whole model: `shared` is sharded by TP, `experts` (routed) by TP, under EP by TP x DP."""

    shared: int
    experts: int

    def per_gpu(self, *, tp: int, dp: int, ep: bool) -> float:
        """Query: bytes on one GPU. Without EP each DP replica holds all experts, sharded by its TP."""
        return self.shared / tp + self.experts / (tp * dp if ep else tp)


def weight_bytes(model: ModelSpec, weights: WeightFormat) -> WeightBytes:
    """Query: the bytes of all weights of `model`, its MTP layer included."""
    shared_format = WeightFormat.BF16 if weights is WeightFormat.BF16 else WeightFormat.FP8
    return WeightBytes(shared=_shared_bytes(model, shared_format), experts=_expert_bytes(model, weights))


def expert_bytes_per_expert(model: ModelSpec, weights: WeightFormat) -> int:
    """Query: bytes of one routed expert of one layer (gate, up and down projections)."""
    return 3 * _matrix_bytes(model.moe_intermediate_size, model.hidden_size, weights)


def _expert_bytes(model: ModelSpec, weights: WeightFormat) -> int:
    layers = model.num_moe_layers + model.num_mtp_layers
    return layers * model.num_routed_experts * expert_bytes_per_expert(model, weights)


def _shared_bytes(model: ModelSpec, weights: WeightFormat) -> int:
    attention_layers = model.num_layers + model.num_mtp_layers
    moe_layers = model.num_moe_layers + model.num_mtp_layers
    indexers = model.num_indexers + model.num_mtp_layers
    hidden = model.hidden_size
    embeddings = 2 * model.vocab_size * hidden * _BF16
    mtp_projection = model.num_mtp_layers * 2 * hidden * hidden * _BF16
    mtp_norms = model.num_mtp_layers * 3 * hidden * _BF16
    router = model.num_routed_experts * (hidden * _BF16 + _FP32)
    return (
        attention_layers * _attention_bytes(model, weights)
        + indexers * _indexer_bytes(model, weights)
        + model.num_dense_layers * 3 * _matrix_bytes(model.dense_intermediate_size, hidden, weights)
        + moe_layers * (model.num_shared_experts * expert_bytes_per_expert(model, weights) + router)
        + embeddings
        + mtp_projection
        + mtp_norms
        + hidden * _BF16
    )


def _attention_bytes(model: ModelSpec, weights: WeightFormat) -> int:
    hidden, heads = model.hidden_size, model.num_heads
    matrices = (
        (model.q_lora_rank, hidden),
        (heads * model.qk_head_dim, model.q_lora_rank),
        (model.latent_size, hidden),
        (heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        (hidden, heads * model.v_head_dim),
    )
    norms = (2 * hidden + model.q_lora_rank + model.kv_lora_rank) * _BF16
    return sum(_matrix_bytes(n, k, weights) for n, k in matrices) + norms


def _indexer_bytes(model: ModelSpec, weights: WeightFormat) -> int:
    query = _matrix_bytes(model.index_num_heads * model.index_head_dim, model.q_lora_rank, weights)
    key = _matrix_bytes(model.index_head_dim, model.hidden_size, weights)
    head_weights = model.index_num_heads * model.hidden_size * _BF16
    key_norm = 2 * model.index_head_dim * _BF16
    return query + key + head_weights + key_norm


def _matrix_bytes(n: int, k: int, weights: WeightFormat) -> int:
    elements = n * k
    if weights is WeightFormat.BF16:
        return elements * _BF16
    if weights is WeightFormat.FP8:
        return elements + _FP32 * (-(-n // _FP8_BLOCK)) * (-(-k // _FP8_BLOCK))
    if weights is WeightFormat.NVFP4:
        return elements // 2 + elements // 16
    return elements // 2 + _BF16 * (-(-elements // 128))
