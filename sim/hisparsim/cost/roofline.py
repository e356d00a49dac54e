"""The cost source `roofline`: bytes and FLOPs against datasheet peaks, and the latencies that tables show.

Bytes alone give a sixth of a real decode step at batch 1: layers are short, and most of their time is latency
of many small kernels. So each module of a layer is priced as

    latency(tokens) + max(bytes / (bandwidth x efficiency), FLOPs / (peak x efficiency))

where `latency` is what published layer times of the reference geometry (GLM-5.3, TP8, H200) leave after the
roofline part. Other models, nodes and parallelisms change the roofline part and keep the latency.

Steps with a prefill run eagerly, module after module, none faster than its launch: the floor of any prefill.
Mixed steps price the token-wise modules on prefill and decode tokens together, then decode attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparsim.cost.curve import Counts, largest, total, whole_ns
from hisparsim.cost.figures import Figures, roofline_figures
from hisparsim.cost.link_rates import LinkRates, link_rates
from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import QUIET, Background, StepCost
from hisparsim.cost.modules import Deployment, ModuleTimes, module_times
from hisparsim.cost.terms import TERM_SOURCES, Term
from hisparsim.cost.transfers import StepTransfers, transfers_of
from hisparsim.specs.kv_layout import RowFormat, kv_layout
from hisparsim.specs.models import load_model
from hisparsim.specs.nodes import load_node
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.weights import WeightFormat

_NO_TERMS: dict[str, Counts] = dict.fromkeys(Term, 0)


@dataclass(frozen=True)
class RooflineOptions:
    """Assumptions that can be set. `None` takes the figures file's value."""

    overlap: float = 1.0
    """Share of the transfer time that could hide behind compute and does: 0 = every gather and staging copy
    stalls, 1 = followers of an indexer layer are fetched while earlier layers compute (vLLM 0.33)."""
    resolve_us: float | None = None
    """One residency resolve call of one indexer layer; 0 = free."""
    graph_factor: float | None = None
    """Global factor on the GPU time of steps in a graph."""
    eager_factor: float | None = None
    """Global factor on the GPU time of eager steps."""

    @classmethod
    def of(cls, scenario: Scenario) -> RooflineOptions:
        """Query: the options that a scenario sets (`links.overlap`, `cost.resolve_us`)."""
        return cls(overlap=scenario.links.overlap, resolve_us=scenario.cost.resolve_us)


class RooflineModel:
    """Prices steps of one deployment. Pure: holds tables only, and a memo of compositions already seen."""

    def __init__(
        self,
        deployment: Deployment,
        rates: LinkRates,
        *,
        options: RooflineOptions = RooflineOptions(),
        figures: Figures | None = None,
    ) -> None:
        self.deployment = deployment
        self.rates = rates
        self.options = options
        self.figures = roofline_figures() if figures is None else figures
        model = deployment.model
        self._layers = model.num_layers
        self._indexers = model.num_indexers
        self._modules: ModuleTimes = module_times(
            deployment, reference_deployment(self.figures), self.figures
        )
        layout = kv_layout(model, deployment.row_format, with_mtp=deployment.with_mtp)
        self._transfers = StepTransfers(
            rates=rates,
            row_bytes=layout.row_bytes,
            num_layers=layout.num_layers,
            num_groups=layout.num_indexers,
            overlap=options.overlap,
        )
        call_us = self.figures.number("resolve.call_us")
        query_us = self.figures.number("resolve.query_us")
        if options.resolve_us is not None:
            query_us = query_us * options.resolve_us / call_us
            call_us = options.resolve_us
        self._resolve_call_ns = 1e3 * call_us * layout.num_indexers
        self._resolve_query_ns = 1e3 * query_us * layout.num_indexers
        self._factors = (
            _given(options.eager_factor, self.figures.number("phase.eager_factor")),
            _given(options.graph_factor, self.figures.number("phase.graph_factor")),
        )
        self._memo: dict[tuple[int, ...], _Composition] = {}

    @classmethod
    def of(cls, scenario: Scenario, *, options: RooflineOptions | None = None) -> RooflineModel:
        """Query: the model that a scenario's deployment, links and placement give."""
        if options is None:
            options = RooflineOptions.of(scenario)
        return cls(deployment_of(scenario), link_rates(scenario), options=options)

    # --- the interface -------------------------------------------------------------------------------

    def price(self, load: StepLoad, background: Background = QUIET) -> StepCost:
        """Query: the cost of a load. k steps in one call equal k calls, bit for bit."""
        fixed = self._composition(load)
        modules, factor = self._modules, fixed.factor
        terms = fixed.terms.copy()
        compute: Any = fixed.compute_ns
        if load.num_decodes:
            past = load.query_tokens * load.sum_context_tokens - load.max_context_tokens
            index = (modules.top_k_latency(load.max_context_tokens) + past * modules.index_key_ns) * (
                self._indexers * factor
            )
            sparse = load.selected_rows * (modules.sparse_decode_row_ns * self._layers * factor)
            compute = compute + index + sparse
            whole: Callable[[Any], Any] = whole_ns if isinstance(compute, np.ndarray) else round
            terms[Term.DECODE_INDEXER] = whole(index + fixed.index_ns)
            terms[Term.DECODE_SPARSE] = whole(sparse)
            if load.query_tokens > 1:
                past = load.sum_context_tokens - load.max_context_tokens
                draft = (
                    modules.top_k_latency(load.max_context_tokens) + past * modules.index_key_ns
                ) * factor
                compute = compute + draft
                terms[Term.DRAFTS] = whole(draft + fixed.drafts_ns)
        if load.expert_tokens is not None:
            moe = modules.moe(load.expert_tokens) * factor
            compute = compute + (moe - fixed.moe_ns)
            terms[Term.MOE] = whole_ns(moe)
            if fixed.eager:
                floor = largest(0.0, modules.eager_moe_ns - moe)
                compute = compute + (floor - fixed.moe_launch_ns)
                terms[Term.LAUNCH] = whole_ns(fixed.launch_ns - fixed.moe_launch_ns + floor)
        h2d_bytes, d2h_bytes = transfers_of(self._transfers, load, compute, background, terms)
        total_ns = total(terms.values()) if isinstance(compute, np.ndarray) else sum(terms.values())
        return StepCost(terms=terms, total_ns=total_ns, h2d_bytes=h2d_bytes, d2h_bytes=d2h_bytes)

    def front_end_ns(self, prompt_tokens: int) -> int:
        """Query: time of the serial front end (HTTP, template, tokeniser) for one request."""
        figures = self.figures
        per_token = figures.number("front_end.token_us") * 1e3
        return round(figures.number("front_end.request_us") * 1e3 + per_token * prompt_tokens)

    def idle_start_ns(self) -> int:
        """Query: 0; no published figure is known."""
        return 0

    def sources(self) -> Mapping[str, str]:
        """Query: where the figures of each term come from."""
        return {
            term: "; ".join(self.figures.origin(key) for key in keys) for term, keys in TERM_SOURCES.items()
        }

    # --- what depends on the composition only --------------------------------------------------------

    def _composition(self, load: StepLoad) -> _Composition:
        if load.prefill_tokens:
            return self._compose(load)
        key = (load.num_decodes, load.query_tokens, load.graph_requests, load.resolve)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._compose(load)
        return found

    def _compose(self, load: StepLoad) -> _Composition:
        modules, layers, indexers = self._modules, self._layers, self._indexers
        prefill, decodes, query = load.prefill_tokens, load.num_decodes, load.query_tokens
        graph = load.graph_requests > 0 and prefill == 0
        factor = self._factors[graph]
        batch = max(load.graph_requests, decodes) if graph else decodes
        tokens = batch * query + prefill
        parts: dict[str, float] = {}
        index_ns = drafts_ns = launch = moe_launch = 0.0
        if decodes:
            projections, latency, index_latency, index = modules.attention.at(batch * query)
            parts[Term.DECODE_PROJECTIONS] = layers * projections
            parts[Term.ATTENTION_LATENCY] = layers * latency + indexers * index_latency
            index_ns = indexers * index * factor
            if query > 1:
                parts[Term.DRAFTS] = drafts_ns = modules.drafts(batch, query - 1)
        if prefill:
            projections, _, _, index = modules.attention.at(prefill)
            sparse = load.prefill_selected_rows * modules.sparse_prefill_row_ns
            index += load.prefill_past_tokens * modules.index_pair_ns
            parts[Term.PREFILL_PROJECTIONS] = layers * projections
            parts[Term.PREFILL_SPARSE] = layers * sparse
            parts[Term.PREFILL_INDEXER] = indexers * index
            floor = modules.eager_attention_ns - (projections + sparse) * factor
            launch = (layers - indexers) * max(0.0, floor) + indexers * max(0.0, floor - index * factor)
        moe, shared_expert, dense, collectives, router, norms = modules.token_wise.at(tokens)
        if graph:
            if query > 1:
                moe = modules.moe(modules.sharing_tokens(batch, query))
        else:
            parts[Term.SHARED_EXPERT] = shared_expert
            moe_launch = max(0.0, modules.eager_moe_ns - moe * factor)
            launch += moe_launch
            launch += max(0.0, modules.eager_collectives_ns - collectives * factor)
        parts[Term.MOE] = moe
        parts[Term.DENSE_MLP] = dense
        parts[Term.ALL_REDUCE] = collectives
        parts[Term.ROUTER] = router
        parts[Term.NORMS] = norms
        parts[Term.SAMPLING] = modules.sampling(batch * query + load.num_prefills)
        compute = index_ns + launch
        terms = _NO_TERMS.copy()
        for term, value in parts.items():
            value *= factor
            compute += value
            terms[term] = round(value)
        if launch:
            terms[Term.LAUNCH] = round(launch)
        if load.resolve and decodes:
            waves = max(1.0, decodes / self.deployment.node.num_sms)
            terms[Term.RESOLVE] = round(
                (self._resolve_call_ns + self._resolve_query_ns * (query - 1)) * waves
            )
        return _Composition(
            terms=terms,
            compute_ns=compute,
            index_ns=index_ns,
            drafts_ns=drafts_ns * factor,
            moe_ns=moe * factor,
            launch_ns=launch,
            moe_launch_ns=moe_launch,
            eager=not graph,
            factor=factor,
        )


@dataclass(slots=True)
class _Composition:
    """The part of a price that all steps of one composition share."""

    terms: dict[str, Counts]
    compute_ns: float
    index_ns: float
    drafts_ns: float
    moe_ns: float
    launch_ns: float
    moe_launch_ns: float
    """The part of `launch_ns` that the MoE layers cause."""
    eager: bool
    factor: float


def deployment_of(scenario: Scenario) -> Deployment:
    """Query: what of a scenario the GPU time depends on."""
    return Deployment(
        model=scenario.model_spec,
        node=scenario.node_spec,
        weights=scenario.model.weights,
        row_format=scenario.row_format,
        tp=scenario.parallel.tp,
        dp=scenario.parallel.dp,
        ep=scenario.parallel.ep,
        with_mtp=scenario.speculation.draft_tokens > 0,
    )


def reference_deployment(figures: Figures) -> Deployment:
    """Query: the deployment whose layer times the figures file gives."""
    return Deployment(
        model=load_model(figures.text("reference_model")),
        node=load_node(figures.text("reference_node")),
        weights=WeightFormat.FP8,
        row_format=RowFormat.FP8_DS_MLA,
        tp=figures.whole("reference_tp"),
        dp=1,
        ep=False,
        with_mtp=False,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
