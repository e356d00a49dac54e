"""Seeded random weights of true shapes, cut into the shards of one rank.

A *shard* is the unit of tensor parallelism: a share of the heads, of the MLPs' inner columns and of the
experts. A rank holds consecutive shards; the sum over shards is taken in ascending order. A tensor depends on
the seed and its name alone and is cut afterwards, so that the model is the same whatever the shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hisparsim.specs.models import ModelSpec

from .errors import RealRunError
from .geometry import INDEX_DIM

Maker = Callable[..., torch.Tensor]


@dataclass(frozen=True, eq=False)
class Mlp:
    """A gated MLP: gate and up [a, 2 x inner], down [inner, a]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, eq=False)
class ShardWeights:
    """What one shard computes in one layer."""

    q_up: torch.Tensor
    """[q_lora_rank, heads x (nope + rope)]"""
    k_absorb: torch.Tensor
    """[heads, nope, 512]: queries into the latent space."""
    v_up: torch.Tensor
    """[heads, 512, v_head_dim]"""
    out: torch.Tensor
    """[heads x v_head_dim, hidden]"""
    mlp: Mlp
    """The dense MLP, or the shared experts of a MoE layer."""
    experts: tuple[tuple[int, Mlp], ...]
    """Routed experts by number, ascending; empty in a dense layer."""


@dataclass(frozen=True, eq=False)
class IndexWeights:
    """An indexer: queries [q_lora_rank, heads x 128], key [hidden, 128], head weights [hidden, heads]."""

    query: torch.Tensor
    key: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer; ``router`` [hidden, experts] is None in a dense layer, ``index`` where none is owned."""

    q_down: torch.Tensor
    kv_down: torch.Tensor
    index: IndexWeights | None
    router: torch.Tensor | None
    shards: tuple[ShardWeights, ...]


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All layers, the MTP layer last where there is one; embedding [vocab, hidden], head [hidden, vocab]."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: tuple[LayerWeights, ...]


def make_weights(
    model: ModelSpec,
    *,
    with_mtp: bool,
    seed: int,
    num_shards: int,
    own_shards: range,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelWeights:
    """Query: the weights of the shards ``own_shards`` of ``num_shards``.

    Raises:
        RealRunError: the heads do not divide into so many shards.
    """
    if model.num_heads % num_shards or model.num_heads < num_shards:
        raise RealRunError(
            f"{model.num_heads} heads of {model.name} do not divide into {num_shards} shards; use fewer ranks"
        )

    def make(name: str, *shape: int, fan_in: int) -> torch.Tensor:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        scaled: torch.Tensor = values * fan_in**-0.5
        return scaled.to(dtype)

    layers = tuple(
        _layer(model, layer, num_shards, own_shards, make)
        for layer in range(model.num_kv_layers(with_mtp=with_mtp))
    )
    return ModelWeights(
        make("embedding", model.vocab_size, model.hidden_size, fan_in=1),
        make("head", model.hidden_size, model.vocab_size, fan_in=model.hidden_size),
        layers,
    )


def _layer(model: ModelSpec, layer: int, num_shards: int, own_shards: range, make: Maker) -> LayerWeights:
    hidden, q_rank = model.hidden_size, model.q_lora_rank
    index = None
    if model.owns_indexer(layer):
        heads = model.index_num_heads
        index = IndexWeights(
            make(f"{layer}/index_q", q_rank, heads * INDEX_DIM, fan_in=q_rank),
            make(f"{layer}/index_k", hidden, INDEX_DIM, fan_in=hidden),
            make(f"{layer}/index_w", hidden, heads, fan_in=hidden),
        )
    is_moe = layer >= model.num_dense_layers
    router = make(f"{layer}/router", hidden, model.num_routed_experts, fan_in=hidden) if is_moe else None
    whole = _whole(model, layer, make)
    return LayerWeights(
        make(f"{layer}/q_down", hidden, q_rank, fan_in=hidden),
        make(f"{layer}/kv_down", hidden, model.latent_size, fan_in=hidden),
        index,
        router,
        tuple(_cut(whole, model, layer, shard, num_shards, make) for shard in own_shards),
    )


def _whole(model: ModelSpec, layer: int, make: Maker) -> ShardWeights:
    """The layer uncut, without its routed experts."""
    heads, latent, value = model.num_heads, model.kv_lora_rank, model.v_head_dim
    inner = model.moe_intermediate_size * model.num_shared_experts
    if layer < model.num_dense_layers:
        inner = model.dense_intermediate_size
    return ShardWeights(
        make(f"{layer}/q_up", model.q_lora_rank, heads * model.qk_head_dim, fan_in=model.q_lora_rank),
        make(f"{layer}/k_absorb", heads, model.qk_nope_head_dim, latent, fan_in=model.qk_nope_head_dim),
        make(f"{layer}/v_up", heads, latent, value, fan_in=latent),
        make(f"{layer}/out", heads * value, model.hidden_size, fan_in=heads * value),
        _mlp(make, f"{layer}/mlp", model.hidden_size, inner),
        (),
    )


def _cut(
    whole: ShardWeights, model: ModelSpec, layer: int, shard: int, num_shards: int, make: Maker
) -> ShardWeights:
    """One shard's heads, inner columns and experts."""

    def share(size: int) -> slice:
        return slice(shard * size // num_shards, (shard + 1) * size // num_shards)

    heads = share(model.num_heads)
    inner = whole.mlp.down.shape[0]
    columns = share(inner)
    gate, up = whole.mlp.gate_up[:, columns], whole.mlp.gate_up[:, inner:][:, columns]
    queries = slice(heads.start * model.qk_head_dim, heads.stop * model.qk_head_dim)
    values = slice(heads.start * model.v_head_dim, heads.stop * model.v_head_dim)
    experts = range(0)
    if layer >= model.num_dense_layers:
        numbers = share(model.num_routed_experts)
        experts = range(numbers.start, numbers.stop)
    hidden, width = model.hidden_size, model.moe_intermediate_size
    return ShardWeights(
        whole.q_up[:, queries].contiguous(),
        whole.k_absorb[heads].contiguous(),
        whole.v_up[heads].contiguous(),
        whole.out[values].contiguous(),
        Mlp(torch.cat([gate, up], 1), whole.mlp.down[columns].contiguous()),
        tuple((expert, _mlp(make, f"{layer}/expert{expert}", hidden, width)) for expert in experts),
    )


def _mlp(make: Maker, name: str, hidden: int, inner: int) -> Mlp:
    return Mlp(
        make(f"{name}/gate_up", hidden, 2 * inner, fan_in=hidden),
        make(f"{name}/down", inner, hidden, fan_in=max(inner, 1)),
    )
