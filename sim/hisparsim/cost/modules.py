"""Times of the modules of one layer on one GPU, tabulated over token counts when a model is built.

All times are nanoseconds of GPU work before the phase factors. What the published layer times of the
reference deployment leave after its roofline part is the latency of a module; it is carried over unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.curve import Curve, CurveBank, token_grid
from hisparsim.cost.experts import distinct_experts, pick_probabilities
from hisparsim.cost.figures import Figures
from hisparsim.cost.work import LayerWork, layer_work
from hisparsim.specs.kv_layout import RowFormat, row_bytes
from hisparsim.specs.models import ModelSpec
from hisparsim.specs.nodes import NodeSpec
from hisparsim.specs.weights import WeightFormat

_NS = 1e9
_US = 1e3
_MAX_TOKENS = 1 << 21
_INDEX_SCALE_BYTES = 4
_RING = 2
"""An all-reduce moves each element twice, reduce and spread, but for the share that stays."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Deployment:
    """What the GPU time depends on: model, node, formats and parallelism."""

    model: ModelSpec
    node: NodeSpec
    weights: WeightFormat
    row_format: RowFormat
    tp: int
    dp: int
    ep: bool
    with_mtp: bool


@dataclass(frozen=True)
class ModuleTimes:
    """Times in ns, by tokens where nothing else is said."""

    attention: CurveBank
    """One layer: (projections, latency, further latency in an indexer layer, projections of the indexer)."""
    token_wise: CurveBank
    """All layers: (MoE, shared expert, dense MLPs, collectives, router, norms)."""
    moe: Curve
    """All MoE layers, without the shared expert; the first of `token_wise`."""
    sampling: Curve
    """Output head and sampling, over the sampled tokens."""
    draft: Curve
    """One draft pass of the MTP layer over the requests, its context part left out."""
    first_draft: Curve
    """What the first pass takes beyond that: its own indexer (later passes share its top-k)."""
    top_k_latency: Curve
    """Of an indexer layer, over the longest context."""
    index_key_ns: float
    """To stream one past token's index key in decode."""
    index_pair_ns: float
    """One query token against one past token in prefill."""
    sparse_decode_row_ns: float
    sparse_prefill_row_ns: float
    eager_attention_ns: float
    """Least time of one attention module that is launched eagerly."""
    eager_moe_ns: float
    """Of all MoE layers together."""
    eager_collectives_ns: float
    """Of all collectives together."""
    verify_sharing: float

    def drafts(self, requests: int, num_passes: int) -> float:
        """Query: the draft passes of a step."""
        return float(num_passes * self.draft(requests) + self.first_draft(requests))

    def sharing_tokens(self, requests: int, query_tokens: int) -> int:
        """Query: tokens that touch as many distinct experts as the verify tokens of these requests."""
        return int(np.ceil(requests * (1.0 + self.verify_sharing * (query_tokens - 1))))


@dataclass(frozen=True)
class _Rates:
    """Rates of one GPU that modules run at: bytes/ns and FLOP/ns."""

    hbm: float
    gemm: float
    moe_hbm: float
    moe: float
    head: float


class _Roofline:
    """The part of module times that bytes and FLOPs explain, for one deployment."""

    def __init__(self, deployment: Deployment, figures: Figures) -> None:
        self.deployment = deployment
        self.figures = figures
        self.work: LayerWork = layer_work(
            deployment.model,
            deployment.weights,
            tp=deployment.tp,
            dp=deployment.dp,
            ep=deployment.ep,
            padded_heads=figures.whole("layers.padded_heads"),
        )
        node, share = deployment.node, figures.number
        hbm, peak = node.hbm_bytes_per_s / _NS, node.peak_flops
        bf16_gemm = peak.bf16 * share("efficiency.gemm_flops_bf16") / _NS
        fp8_gemm = peak.fp8 * share("efficiency.gemm_flops_fp8") / _NS
        self.rates = _Rates(
            hbm=hbm * share("efficiency.hbm"),
            gemm=bf16_gemm if deployment.weights is WeightFormat.BF16 else fp8_gemm,
            moe_hbm=hbm * share("efficiency.moe_hbm"),
            moe=_expert_peak(deployment) * share("efficiency.moe_flops") / _NS,
            head=bf16_gemm,
        )
        self.row_bytes = row_bytes(deployment.model, deployment.row_format)
        self.picks = pick_probabilities(
            deployment.model.num_routed_experts,
            deployment.model.num_experts_per_token,
            share("layers.popularity_range"),
        )

    def projections(self, tokens: Floats) -> Floats:
        return _roof(
            self.work.projection_bytes, self.work.projection_flops * tokens, self.rates.hbm, self.rates.gemm
        )

    def indexer(self, tokens: Floats) -> Floats:
        return _roof(
            self.work.indexer_bytes, self.work.indexer_flops * tokens, self.rates.hbm, self.rates.gemm
        )

    def moe(self, tokens: Floats) -> Floats:
        distinct = distinct_experts(tokens, self.picks) * self.work.expert_share
        read = distinct * self.work.expert_bytes
        return _roof(read, self.work.routed_flops * tokens, self.rates.moe_hbm, self.rates.moe)

    def sparse_decode_row_ns(self) -> float:
        node, share = self.deployment.node, self.figures.number
        streamed = self.row_bytes / (node.hbm_bytes_per_s * share("efficiency.sparse_decode_hbm"))
        computed = self.work.sparse_flops_per_row / (
            node.peak_flops.bf16 * share("efficiency.sparse_decode_flops")
        )
        return max(streamed, computed) * _NS

    def sparse_prefill_row_ns(self) -> float:
        plain = self.deployment.row_format is RowFormat.BF16
        key = "efficiency.sparse_prefill_flops_bf16" if plain else "efficiency.sparse_prefill_flops"
        rate = self.deployment.node.peak_flops.bf16 * self.figures.number(key)
        return self.work.sparse_flops_per_row / rate * _NS

    def index_key_ns(self) -> float:
        key_bytes = self.deployment.model.index_head_dim + _INDEX_SCALE_BYTES
        rate = self.deployment.node.hbm_bytes_per_s * self.figures.number("efficiency.index_keys_hbm")
        return key_bytes / rate * _NS

    def index_pair_ns(self) -> float:
        rate = self.deployment.node.peak_flops.fp8 * self.figures.number("efficiency.index_prefill_flops")
        return self.work.index_key_flops / rate * _NS


@dataclass(frozen=True)
class _Latencies:
    """Latencies in ns that the reference deployment's published times leave, by tokens."""

    attention: Curve
    index: Curve
    moe: Curve
    all_reduce: Curve
    """By elements."""


def module_times(deployment: Deployment, reference: Deployment, figures: Figures) -> ModuleTimes:
    """Query: the module times of a deployment, with the latencies of the reference deployment."""
    roof = _Roofline(deployment, figures)
    latencies = _reference_latencies(_Roofline(reference, figures), figures)
    model, work, rates, figure = deployment.model, roof.work, roof.rates, figures.number
    grid = token_grid(_MAX_TOKENS)
    layers, moe_layers = model.num_layers, model.num_moe_layers

    def curve(function: Callable[[Floats], Any], *, times: float = 1.0) -> Curve:
        """Query: a curve over tokens that is 0 where there are none."""
        return Curve.of(grid, lambda tokens: np.where(tokens > 0, times * function(tokens), 0.0))

    def mlp(floor_us: float, weight_bytes: float, flops: float) -> Callable[[Floats], Floats]:
        return lambda tokens: floor_us * _US + _roof(weight_bytes, flops * tokens, rates.hbm, rates.gemm)

    moe_layer = curve(lambda tokens: _at(latencies.moe, tokens) + roof.moe(tokens))
    reduce_layer = curve(lambda tokens: _all_reduce(deployment, latencies.all_reduce, tokens, figures))
    exchange_layer = curve(lambda tokens: _exchange(deployment, tokens, figures))
    exchanges = deployment.ep and deployment.dp > 1
    num_reduces = 0 if deployment.tp == 1 else 2 * layers - (moe_layers if exchanges else 0)
    num_exchanges = 2 * moe_layers if exchanges else 0
    moe = moe_layer.scaled(moe_layers)
    collectives = reduce_layer.scaled(num_reduces) + exchange_layer.scaled(num_exchanges)
    router_bytes_ns = work.router_bytes / rates.hbm
    router = curve(
        lambda tokens: (
            np.maximum(figure("layers.router_us") * _US, router_bytes_ns)
            + work.router_flops * tokens / rates.head
        )
    )
    norm_bytes = figure("layers.norm_bytes_per_element") * model.hidden_size
    norm = curve(lambda tokens: figure("layers.norm_us") * _US + norm_bytes * tokens / rates.hbm)
    sampling = curve(
        lambda tokens: (
            figure("layers.sampling_us") * _US
            + _roof(work.head_bytes, work.head_flops * tokens, rates.hbm, rates.head)
        )
    )
    row_ns = roof.sparse_decode_row_ns()
    attention = curve(
        lambda tokens: (
            roof.projections(tokens) + _at(latencies.attention, tokens) + model.index_top_k * row_ns * tokens
        )
    )
    index_layer = curve(lambda tokens: roof.indexer(tokens) + _at(latencies.index, tokens))
    constant = curve(lambda tokens: np.full_like(tokens, figure("layers.draft_us") * _US))
    draft = attention + moe_layer + reduce_layer.scaled(0 if deployment.tp == 1 else 2) + router
    shared_expert = curve(
        mlp(figure("layers.shared_expert_us"), work.shared_expert_bytes, work.shared_expert_flops),
        times=moe_layers if model.num_shared_experts else 0.0,
    )
    dense = curve(
        mlp(figure("layers.dense_mlp_us"), work.dense_bytes, work.dense_flops), times=model.num_dense_layers
    )
    return ModuleTimes(
        attention=CurveBank(
            [
                curve(roof.projections),
                curve(lambda tokens: _at(latencies.attention, tokens)),
                curve(lambda tokens: _at(latencies.index, tokens)),
                curve(roof.indexer),
            ]
        ),
        token_wise=CurveBank(
            [moe, shared_expert, dense, collectives, router.scaled(moe_layers), norm.scaled(2 * layers)]
        ),
        moe=moe,
        sampling=sampling,
        draft=draft + norm.scaled(2) + sampling + constant,
        first_draft=index_layer,
        top_k_latency=Curve(
            [int(x) for x in figures.row("top_k_latency_us.context_tokens")],
            [_US * y for y in figures.row("top_k_latency_us.growth")],
        ),
        index_key_ns=roof.index_key_ns(),
        index_pair_ns=roof.index_pair_ns(),
        sparse_decode_row_ns=row_ns,
        sparse_prefill_row_ns=roof.sparse_prefill_row_ns(),
        eager_attention_ns=figure("eager_us.attention") * _US,
        eager_moe_ns=figure("eager_us.moe") * _US * moe_layers,
        eager_collectives_ns=figure("eager_us.all_reduce") * _US * (num_reduces + num_exchanges),
        verify_sharing=figure("layers.verify_expert_sharing"),
    )


def _reference_latencies(roof: _Roofline, figures: Figures) -> _Latencies:
    tokens = np.asarray(figures.row("layer_us.tokens"))
    plain = np.asarray(figures.row("layer_us.attention_without_indexer")) * _US
    leader = np.asarray(figures.row("layer_us.attention_with_indexer")) * _US
    moe = np.asarray(figures.row("layer_us.moe")) * _US
    rows = roof.deployment.model.index_top_k * tokens
    keys = figures.number("layer_us.indexer_context_tokens") * (tokens - 1)
    attention = plain - roof.projections(tokens) - rows * roof.sparse_decode_row_ns()
    index = leader - plain - roof.indexer(tokens) - keys * roof.index_key_ns()
    elements = np.asarray(figures.row("all_reduce_us.elements"))
    wire = _wire_ns(roof.deployment, elements)
    return _Latencies(
        attention=_held(tokens, attention),
        index=_held(tokens, index),
        moe=_held(tokens, moe - roof.moe(tokens)),
        all_reduce=_held(elements, np.asarray(figures.row("all_reduce_us.value")) * _US - wire),
    )


def _held(xs: Floats, ys: Floats) -> Curve:
    """Query: a latency curve that keeps its last value beyond the last point, never negative."""
    points = [*(int(x) for x in xs), 2 * int(xs[-1])]
    return Curve(points, [max(0.0, float(y)) for y in (*ys, ys[-1])])


def _at(curve: Curve, tokens: Floats) -> Floats:
    return np.asarray(curve(tokens.astype(np.int64)), dtype=np.float64)


def _roof(num_bytes: Any, flops: Any, bytes_per_ns: float, flops_per_ns: float) -> Floats:
    """Query: ns of the slower of streaming and computing."""
    return np.asarray(np.maximum(num_bytes / bytes_per_ns, flops / flops_per_ns))


def _expert_peak(deployment: Deployment) -> float:
    """Query: FLOP/s of the units that the routed experts' format runs on.

    fp4 weights without fp4 units are unpacked to bf16; w4a8 computes in fp8.
    """
    peak = deployment.node.peak_flops
    match deployment.weights:
        case WeightFormat.BF16:
            return peak.bf16
        case WeightFormat.NVFP4:
            return peak.bf16 if peak.fp4 is None else peak.fp4
        case _:
            return peak.fp8


def _link(node: NodeSpec) -> float:
    """Query: bytes/ns between GPUs, each way: NVLink, or PCIe where there is none."""
    rate = node.nvlink_bytes_per_s
    return (node.pcie.copy_engine.all_gpus_duplex.d2h_bytes_per_s if rate is None else rate) / _NS


def _wire_ns(deployment: Deployment, elements: Floats) -> Floats:
    """Query: ns that the bytes of an all-reduce over TP need at the link's rate."""
    share = _RING * (deployment.tp - 1) / deployment.tp
    return np.asarray(elements * 2.0 * share / _link(deployment.node))


def _all_reduce(deployment: Deployment, latency: Curve, tokens: Floats, figures: Figures) -> Floats:
    elements = tokens * deployment.model.hidden_size
    waiting = _at(latency, elements)
    if deployment.node.nvlink_bytes_per_s is None:
        waiting = np.maximum(waiting, figures.number("all_reduce_us.floor_without_nvlink") * _US)
    return waiting + _wire_ns(deployment, elements)


def _exchange(deployment: Deployment, tokens: Floats, figures: Figures) -> Floats:
    """Query: ns of one all-to-all between tokens and their experts (half a dispatch, half a combine)."""
    model, num_gpus = deployment.model, deployment.tp * deployment.dp
    copies = tokens / deployment.tp * min(model.num_experts_per_token, num_gpus)
    mean_bytes = 1.5 * model.hidden_size
    away = (num_gpus - 1) / num_gpus
    floor = figures.number("all_reduce_us.all_to_all_floor") * _US
    return np.asarray(floor + copies * mean_bytes * away / _link(deployment.node))
