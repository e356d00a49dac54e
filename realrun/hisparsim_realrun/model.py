"""The model's layers: projections, indexer, output projection, MLPs and experts, on one rank's shards.

Attention is absorbed MLA: a query head is taken into the latent space (512 elements) and stands beside its
rotary part (64), so that a cached row of 576 elements is key and value at once. Norms have unit weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import layer_norm, rms_norm, silu

from hisparsim.cost.terms import Term
from hisparsim.specs.models import ModelSpec

from .clock import StepClock
from .geometry import INDEX_DIM
from .weights import IndexWeights, Mlp, ModelWeights

ROPE_BASE = 10_000.0
EPS = 1e-6


class Products(Protocol):
    """How matrices are multiplied: plainly, or in fixed shapes."""

    def matmul(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def per_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class Combine(Protocol):
    """How partial results of shards become one: [tokens, hidden] each, in ascending order of shards."""

    def __call__(self, partials: list[torch.Tensor]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """What attention needs of a layer's tokens."""

    q_rank: torch.Tensor
    """[tokens, q_lora_rank]"""
    queries: torch.Tensor
    """[tokens, own heads, 576]"""
    latent: torch.Tensor
    """[tokens, 512]"""
    rope: torch.Tensor
    """[tokens, 64]"""


class Model:
    """Layers of one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        products: Products,
        combine: Combine,
        clock: StepClock,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.products = products
        self.combine = combine
        self.clock = clock
        self.scale = float(spec.qk_head_dim) ** -0.5

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]"""
        return self.weights.embedding[token_ids]

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm of the last dimension."""
        return rms_norm(x, (x.shape[-1],), eps=EPS)

    # -- attention --------------------------------------------------------------------------------

    def project(self, layer: int, x: torch.Tensor, angles: torch.Tensor) -> Projected:
        """x [tokens, hidden] (normed) and rotary angles [tokens, 32] -> queries and rows."""
        spec, weights, matmul = self.spec, self.weights.layers[layer], self.products.matmul
        q_rank = self.norm(matmul(x, weights.q_down))
        parts = []
        for shard in weights.shards:
            q = matmul(q_rank, shard.q_up).view(len(x), -1, spec.qk_head_dim)
            absorbed = self.products.per_head(q[:, :, : spec.qk_nope_head_dim], shard.k_absorb)
            parts.append(torch.cat([absorbed, rotate(q[:, :, spec.qk_nope_head_dim :], angles[:, None])], -1))
        queries = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        kv = matmul(x, weights.kv_down)
        latent = self.norm(kv[:, : spec.kv_lora_rank])
        return Projected(q_rank, queries, latent, rotate(kv[:, spec.kv_lora_rank :], angles))

    def index_keys(self, index: IndexWeights, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 128]"""
        return layer_norm(self.products.matmul(x, index.key), (INDEX_DIM,), eps=EPS)

    def index_queries(
        self, index: IndexWeights, q_rank: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads, 128] and head weights [tokens, heads]."""
        queries = self.products.matmul(q_rank, index.query).view(len(x), -1, INDEX_DIM)
        return queries, self.products.matmul(x, index.head)

    def project_out(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """attended [tokens, own heads, 512] -> [tokens, hidden], summed over all shards."""
        shards = self.weights.layers[layer].shards
        heads = attended.shape[1] // len(shards)
        partials = []
        for number, shard in enumerate(shards):
            own = attended[:, number * heads : (number + 1) * heads]
            values = self.products.per_head(own, shard.v_up).reshape(len(attended), -1)
            partials.append(self.products.matmul(values, shard.out))
        return self._combined(partials, Term.DECODE_PROJECTIONS)

    # -- feed-forward -----------------------------------------------------------------------------

    def feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] (normed) -> [tokens, hidden], summed over all shards."""
        weights = self.weights.layers[layer]
        if weights.router is None:
            partials = [self._gated(shard.mlp, x) for shard in weights.shards]
            return self._combined(partials, Term.DENSE_MLP)
        scores = torch.softmax(self.products.matmul(x, weights.router).float(), -1)
        top = torch.topk(scores, self.spec.num_experts_per_token, -1)
        share = (top.values / top.values.sum(-1, keepdim=True)).to(x.dtype)
        self.clock.mark(Term.ROUTER)
        partials = [self._gated(shard.mlp, x) for shard in weights.shards]
        self.clock.mark(Term.SHARED_EXPERT)
        for partial, shard in zip(partials, weights.shards, strict=True):
            for expert, mlp in shard.experts:
                token, rank = (top.indices == expert).nonzero(as_tuple=True)
                if len(token):
                    partial[token] += share[token, rank, None] * self._gated(mlp, x[token])
        return self._combined(partials, Term.MOE)

    def _gated(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.products.matmul(x, mlp.gate_up).chunk(2, -1)
        return self.products.matmul(silu(gate) * up, mlp.down)

    def _combined(self, partials: list[torch.Tensor], term: Term) -> torch.Tensor:
        self.clock.mark(term)
        total = self.combine(partials)
        self.clock.mark(Term.ALL_REDUCE)
        return total

    # -- head -------------------------------------------------------------------------------------

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n] arg-max tokens of the seeded head."""
        return self.products.matmul(hidden, self.weights.head).argmax(-1)


def rope_angles(positions: torch.Tensor, width: int) -> torch.Tensor:
    """positions [n] -> angles [n, width / 2] float32."""
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
    return (positions.double()[:, None] * ROPE_BASE ** (-steps / width)).float()


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + half) of x [..., width] by ``angles`` [..., width / 2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


def sum_of(partials: list[torch.Tensor]) -> torch.Tensor:
    """The sum of one rank's shards, in ascending order."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total
