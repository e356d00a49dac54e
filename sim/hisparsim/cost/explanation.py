"""One step explained: its load, the time of each term, and where the figures come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hisparsim.cost.link_rates import LinkRates, link_rates
from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import StepCost
from hisparsim.cost.sources import cost_model
from hisparsim.cost.terms import Term
from hisparsim.locality.profile import load_profile
from hisparsim.serving.plan import NO_PAGES, DecodeBatch, PrefillChunk, StepPlan, graph_bucket
from hisparsim.serving.policies import policy_class
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.kv_layout import pages_of
from hisparsim.specs.presets import PresetKind, load_preset
from hisparsim.specs.scenario import Scenario


@dataclass(frozen=True)
class Example:
    """The step to explain: `batch` like decodes, and one prefill chunk, in every replica alike."""

    batch: int = 16
    context_tokens: int = 80_000
    """Of each decode."""
    prefill_tokens: int = 0
    past_tokens: int = 0
    """Tokens of the prefill's request that are computed already."""
    resident_share: float | None = None
    """Share of the earlier context that is readable on the GPU; None = 1 where the policy keeps all KV there,
    else 0."""


@dataclass(frozen=True)
class ExplainedTerm:
    """One line of the table."""

    name: str
    duration_ns: int
    share: float
    """Of the step's time."""
    source: str


@dataclass(frozen=True)
class Explanation:
    """A step, its price and its lines."""

    scenario: Scenario
    load: StepLoad
    cost: StepCost
    terms: tuple[ExplainedTerm, ...]
    total_ns: int
    front_end_ns: int
    """Of one request whose prompt is as long as the prefill and its past."""


def explain_step(scenario: Scenario, example: Example) -> Explanation:
    """Query: the priced step of an example under a scenario's policy.

    Raises ScenarioError where the example is no step of this scenario.
    """
    _check(scenario, example)
    top_k = scenario.model_spec.index_top_k
    packed = policy_class(scenario.policy.name).uses_groups
    share = example.resident_share
    if share is None:
        share = 0.0 if packed else 1.0
    plan = _plan(scenario, example, share, packed=packed)
    decodes = plan.decodes
    profile = load_profile(scenario.locality.profile, top_k)
    missed = 0
    if packed and example.batch:
        missed = int(
            profile.missed_millirows(
                decodes.context_tokens,
                decodes.resident_pages,
                decodes.pages,
                decodes.hot_rows,
                decodes.query_tokens,
            ).sum()
        )
    load = StepLoad.of(plan, top_k=top_k, resolve=packed, missed_millirows=missed)
    parallel = scenario.parallel
    if parallel.ep and parallel.dp > 1:
        load = load.with_expert_tokens(load.num_tokens * parallel.dp)
    model = cost_model(scenario)
    cost = model.price(load)
    sources = {**model.sources(), **_link_sources(scenario, profile.source)}
    total = int(cost.totals(1)[0])
    lines = [
        ExplainedTerm(str(term), int(value), int(value) / total, sources.get(term, ""))
        for term, value in cost.terms.items()
        if value
    ]
    prompt = example.prefill_tokens + example.past_tokens
    return Explanation(
        scenario=scenario,
        load=load,
        cost=cost,
        terms=tuple(sorted(lines, key=lambda line: -line.duration_ns)),
        total_ns=total,
        front_end_ns=model.front_end_ns(prompt) if prompt else 0,
    )


def _check(scenario: Scenario, example: Example) -> None:
    limits = scenario.scheduler
    tokens = example.batch * scenario.query_len + example.prefill_tokens
    if min(example.batch, example.prefill_tokens, example.past_tokens) < 0 or tokens == 0:
        raise ScenarioError(
            "a step needs a decode (--batch) or a prefill (--prefill), and no negative counts"
        )
    if example.batch > limits.max_num_seqs or tokens > limits.max_num_batched_tokens:
        raise ScenarioError(
            f"{example.batch} decodes and {tokens} tokens exceed scheduler.max_num_seqs {limits.max_num_seqs}"
            f" or max_num_batched_tokens {limits.max_num_batched_tokens}; raise these or ask for less"
        )
    longest = max(
        example.context_tokens if example.batch else 0, example.prefill_tokens + example.past_tokens
    )
    if example.batch and example.context_tokens < 1:
        longest = example.context_tokens
    if longest > limits.max_model_len or (example.batch and example.context_tokens < 1):
        raise ScenarioError(
            f"a request of {longest} tokens: contexts lie within 1..scheduler.max_model_len "
            f"{limits.max_model_len}"
        )
    share = example.resident_share
    if share is not None and not 0.0 <= share <= 1.0:
        raise ScenarioError(f"--resident-share {share:g}: a share lies within 0..1")


def _plan(scenario: Scenario, example: Example, share: float, *, packed: bool) -> StepPlan:
    """Query: the plan of an example; without groups everything is resident and nothing is mirrored."""
    batch = example.batch
    context = np.full(batch, example.context_tokens, dtype=np.int64)
    pages = resident = NO_PAGES
    if packed:
        pages = np.full(batch, pages_of(example.context_tokens), dtype=np.int64)
        resident = np.rint(pages * share).astype(np.int64)
    prefills: tuple[PrefillChunk, ...] = ()
    if example.prefill_tokens:
        past_pages = pages_of(example.past_tokens)
        staged = past_pages - round(past_pages * share) if packed else 0
        prefills = (PrefillChunk(batch, example.past_tokens, example.prefill_tokens, True, staged),)
    query = scenario.query_len
    return StepPlan(
        plan_id=0,
        decodes=DecodeBatch(
            tuple(range(batch)), context, pages, resident, query, scenario.hot_rows if packed else 0
        ),
        prefills=prefills,
        actions=(),
        mirrored_tokens=batch * query + example.prefill_tokens if packed else 0,
        graph_bucket=None if prefills else graph_bucket(batch),
    )


def _link_sources(scenario: Scenario, locality: str) -> dict[str, str]:
    """Query: where the rates of the transfers inside a step come from."""
    rates: LinkRates = link_rates(scenario)
    presets = load_preset(PresetKind.NODE, scenario.node.preset).sources
    row = "alone" if rates.num_gpus == 1 else "all_gpus"
    writing = "alone" if rates.num_writers == 1 else "all_gpus"

    def text(override: float | None, rate: float, key: str, source: str) -> str:
        return f"{rate / 1e9:.1f} GB/s a GPU, " + (source if override is None else f"set by {key}")

    links = scenario.links
    gather = presets.get(f"pcie.kernel.{row}.h2d_bytes_per_s", "")
    read = presets.get(f"pcie.copy_engine.{row}.h2d_bytes_per_s", "")
    write = presets.get(f"pcie.copy_engine.{writing}.d2h_bytes_per_s", "")
    return {
        Term.HOT_GATHER: text(links.gather_gb_per_s, rates.gather, "links.gather_gb_per_s", gather)
        + f"; misses: {locality}",
        Term.STAGING: text(links.h2d_gb_per_s, rates.h2d, "links.h2d_gb_per_s", read),
        Term.MIRROR: text(links.d2h_gb_per_s, rates.d2h, "links.d2h_gb_per_s", write),
    }
