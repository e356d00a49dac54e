"""A description from a real trace: distributions only, no row of it; and how close a draw from it comes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draws import gaps as draw_gaps
from ..draws import stream
from ..errors import TraceError
from ..replay import spread_ties
from ..reuse import ideal_reuse, leading_hits, previous_access, stack_distances
from ..statistics import dispersion, gap_cv, rate
from ..trace import Floats, Ints, Trace
from .description import (
    Arrivals,
    Description,
    Knots,
    LengthsLaw,
    Prefixes,
    ReuseBin,
    Root,
    Sessions,
    Shrinking,
)
from .draw import draw_arrivals, synthesise

_PROBABILITIES = (
    *(0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    *(0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0),
)
_MIN_ROWS = 20
_PROFILE_STEPS = 20
_MAX_ROOT_BLOCKS = 64


def fit(trace: Trace, *, seed: int = 0, name: str | None = None) -> Description:
    """The description a trace looks drawn from.

    Turns that wait for others make sessions; otherwise block ids make a prefix tree; otherwise there are only
    lengths and arrivals. Stamps that share coarse ticks are spread within them first.

    Raises:
        TraceError: fewer than 20 requests, which fix no distribution.
    """
    n = trace.num_requests
    if n < _MIN_ROWS:
        raise TraceError(
            f"trace {trace.name!r} has {n} requests; at least {_MIN_ROWS} are needed to fit anything"
        )
    has_sessions = (trace.parent >= 0).mean() > 0.3
    first = trace.parent < 0 if has_sessions else np.ones(n, bool)
    law = LengthsLaw(
        input_tokens=knots(trace.input_tokens[first]),
        output_tokens=knots(trace.output_tokens),
        correlation=0.0 if has_sessions else copula_correlation(trace.input_tokens, trace.output_tokens),
    )
    prefixes = None
    if trace.block_tokens is not None and not has_sessions and len(trace.block_ids):
        prefixes = fit_prefixes(trace)
    return Description(
        name=name or f"like-{trace.name}",
        seed=seed,
        num_requests=n,
        arrivals=fit_arrivals(trace, seed),
        lengths=law,
        prefixes=prefixes,
        sessions=fit_sessions(trace) if has_sessions else None,
        source=f"fitted to {n} requests of a {trace.format} trace, sha256 {trace.sha256[:16]}",
    )


def knots(values: Ints | Floats, weights: Floats | None = None) -> Knots:
    """Quantiles at fixed probabilities; enough for a shape, too few to tell a row."""
    if weights is None:
        quantiles = np.quantile(values, _PROBABILITIES)
    else:
        order = np.argsort(values, kind="stable")
        share = np.cumsum(weights[order])
        quantiles = np.interp(_PROBABILITIES, (share - weights[order] / 2) / share[-1], values[order])
    return [
        (p, round(float(v), 6)) for p, v in zip(_PROBABILITIES, np.maximum.accumulate(quantiles), strict=True)
    ]


def ranks(values: Ints) -> Floats:
    """Mean ranks, ties sharing theirs. [n] -> [n]"""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return np.asarray((below + (counts - 1) / 2)[inverse], np.float64)


def rank_correlation(a: Ints, b: Ints) -> float:
    """Spearman's, 0 where one side is constant."""
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def copula_correlation(a: Ints, b: Ints) -> float:
    """The Gaussian copula's correlation that gives the rank correlation seen."""
    return float(np.clip(2 * np.sin(np.pi / 6 * rank_correlation(a, b)), -0.99, 0.99))


def ks_distance(a: Ints | Floats, b: Ints | Floats) -> float:
    """Kolmogorov-Smirnov distance of two samples."""
    both = np.concatenate([a, b])
    below_a = np.searchsorted(np.sort(a), both, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), both, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def root_arrivals(trace: Trace) -> Floats:
    """Arrivals of rows that wait for none, spread within coarse ticks where most stamps are shared."""
    roots = trace.arrival_s[trace.parent < 0]
    if in_ticks(roots):
        spread = spread_ties(trace, float(np.median(np.diff(np.unique(roots)))))
        return spread.arrival_s[trace.parent < 0]
    return roots


def in_ticks(arrival_s: Floats) -> bool:
    """Whether most requests share their stamp with others."""
    return 2 < len(np.unique(arrival_s)) < 0.5 * len(arrival_s)


def fit_arrivals(trace: Trace, seed: int) -> Arrivals:
    """Rate by time, and the renewal law (or bursts and silences) that comes closest to the gaps."""
    arrival = root_arrivals(trace)
    span = float(arrival[-1] - arrival[0]) if len(arrival) else 0.0
    if span <= 0 or len(arrival) < _MIN_ROWS:
        mean_rate = len(arrival) / span if span > 0 else 1.0
        return Arrivals(process="at-once" if span <= 0 else "poisson", rate_per_s=mean_rate)
    mean_rate = (len(arrival) - 1) / span
    profile: list[tuple[float, float]] = []
    steady = arrival
    if len(arrival) >= 20 * _PROFILE_STEPS:
        edges = np.linspace(0.0, span, _PROFILE_STEPS + 1)
        counts, _ = np.histogram(arrival - arrival[0], edges)
        factors = np.maximum(counts / counts.mean(), 1e-3)
        profile = [
            (float(edge), round(float(factor), 6)) for edge, factor in zip(edges, factors, strict=False)
        ]
        reached = np.concatenate([[0.0], np.cumsum(factors) * (span / _PROFILE_STEPS)])
        steady = np.interp(arrival - arrival[0], edges, reached)
    gaps = np.diff(steady)
    cv = float(np.clip(gap_cv(steady) or 1.0, 0.05, 90.0))
    candidates = [Arrivals(process="poisson", rate_per_s=mean_rate, profile=profile)]
    if in_ticks(trace.arrival_s[trace.parent < 0]):  # what happens within a tick is not recorded
        return candidates[0]
    if not 0.95 < cv < 1.05:
        candidates.append(Arrivals(process="gamma", rate_per_s=mean_rate, cv=cv, profile=profile))
        candidates.append(Arrivals(process="weibull", rate_per_s=mean_rate, cv=cv, profile=profile))
    if cv > 1.5:
        candidates.extend(_on_off(np.diff(arrival), mean_rate))
    return min(candidates, key=lambda law: _misfit(law, gaps, arrival, seed))


def _on_off(gaps: Floats, mean_rate: float) -> list[Arrivals]:
    """Bursts and silences, a gap being a silence where it is ten times the median."""
    silent = gaps > 10 * max(float(np.median(gaps)), 1e-6)
    num = int(silent.sum())
    if num < 3:
        return []
    off, on = float(gaps[silent].mean()), float(gaps[~silent].sum()) / num
    return [Arrivals(process="on-off", rate_per_s=mean_rate, on_s=max(on, 1e-6), off_s=off)]


def _misfit(law: Arrivals, gaps: Floats, arrival: Floats, seed: int) -> float:
    """Distance of the gaps' distributions, and of the dispersion of counts over ten mean gaps."""
    n = max(len(arrival), 5000)
    if law.process == "on-off":
        drawn = draw_arrivals(law, n, seed)
        distance = ks_distance(np.diff(arrival), np.diff(drawn))
    else:
        distance = ks_distance(
            gaps, draw_gaps(stream(seed, "misfit"), n, law.process, law.cv) / law.rate_per_s
        )
        drawn = draw_arrivals(law, len(arrival), seed)
    window = 10 / law.rate_per_s
    real, made = dispersion(arrival - arrival[0], window), dispersion(drawn, window)
    return distance + (0.1 * abs(float(np.log(real / made))) if real and made else 0.0)


def fit_prefixes(trace: Trace) -> Prefixes:
    """Common roots, reuse by prompt length, and how far back the continued prompt lies."""
    assert trace.block_tokens is not None
    counts = np.diff(trace.block_offsets)
    has = counts > 0
    hits = leading_hits(trace)
    roots = _roots(trace, counts)
    deepest = max((root.blocks for root in roots), default=0)
    behind = trace.input_tokens // trace.block_tokens - deepest
    share = np.divide(
        np.maximum(hits - deepest, 0), behind, out=np.zeros(len(hits)), where=has & (behind > 0)
    )
    share = np.minimum(share, 1.0)
    bounds = np.unique(np.quantile(trace.input_tokens, [0.25, 0.5, 0.75, 1.0]).astype(np.int64))
    which = np.searchsorted(bounds, trace.input_tokens)
    bins = [
        ReuseBin(up_to_tokens=max(int(bound), 1), shared=knots(share[which == k]))
        for k, bound in enumerate(bounds)
        if (which == k).any()
    ]
    continued = np.flatnonzero(hits > deepest)
    recency: Knots = [(0.0, 1.0), (1.0, 1000.0)]
    if len(continued) >= 5:
        row_of = np.repeat(np.arange(trace.num_requests), counts)
        before = previous_access(trace.block_ids)
        last_hit = trace.block_offsets[continued] + hits[continued] - 1
        back = np.maximum(continued - row_of[before[last_hit]], 1)
        # a distance is seen only where the trace had already run so long: weigh the long ones up
        seen = np.maximum(1 - back / trace.num_requests, 0.1)
        recency = knots(back, 1 / seen)
    return Prefixes(block_tokens=trace.block_tokens, roots=roots, reuse=bins, recency_requests=recency)


def _roots(trace: Trace, counts: Ints) -> list[Root]:
    """First blocks that at least 2 % of the requests have, as deep as nine tenths of those agree."""
    rows = np.flatnonzero(counts > 0)
    firsts = trace.block_ids[trace.block_offsets[rows]]
    _, inverse, sizes = np.unique(firsts, return_inverse=True, return_counts=True)
    roots: list[Root] = []
    for k in np.argsort(-sizes)[:32].tolist():
        share = sizes[k] / trace.num_requests
        if share < 0.02 or sizes[k] < 3:
            break
        members = rows[inverse == k]
        depth = 1
        while depth < _MAX_ROOT_BLOCKS:
            long = members[counts[members] > depth]
            if not len(long):
                break
            _, agreeing = np.unique(trace.block_ids[trace.block_offsets[long] + depth], return_counts=True)
            if agreeing.max() < 0.9 * len(members):
                break
            depth += 1
        roots.append(Root(share=float(share), blocks=depth))
    return roots


def fit_sessions(trace: Trace) -> Sessions:
    """Turns a session, tokens a turn adds, think times, and how contexts shrink."""
    has_parent = trace.parent >= 0
    root = np.arange(trace.num_requests)
    for row in np.flatnonzero(has_parent).tolist():
        root[row] = root[trace.parent[row]]
    turns = np.unique(root, return_counts=True)[1]
    parents = trace.parent[has_parent]
    context = trace.input_tokens[parents] + trace.output_tokens[parents]
    grown = trace.input_tokens[has_parent] - context
    think = trace.think_s[has_parent]
    known = think[~np.isnan(think)]
    if not len(known):
        known = np.maximum(trace.arrival_s[has_parent] - trace.arrival_s[parents], 0.0)
        known = known[~np.isnan(known)]
    shrinking = None
    shrunk = grown < 1
    if shrunk.any():
        rows = np.flatnonzero(has_parent)[shrunk]
        shrinking = Shrinking(
            share=float(shrunk.mean()),
            ratio=knots(trace.input_tokens[rows] / context[shrunk]),
            shared=knots(shared_with_parent(trace, rows) / trace.input_tokens[rows]),
        )
    return Sessions(
        turns=knots(turns),
        new_tokens=knots(grown[~shrunk] if not shrunk.all() else np.ones(1)),
        think_s=knots(known) if len(known) else [(0.0, 0.0), (1.0, 0.0)],
        max_context_tokens=max(int((trace.input_tokens + trace.output_tokens).max()), 2),
        shrinking=shrinking,
    )


def shared_with_parent(trace: Trace, rows: Ints) -> Ints:
    """Leading prompt tokens that equal the parent's context: as declared, or by block ids. [rows]"""
    if trace.block_tokens is None:
        return trace.shared_prefix_tokens[rows]
    out = np.zeros(len(rows), np.int64)
    for k, row in enumerate(rows.tolist()):
        mine, theirs = trace.blocks(row), trace.blocks(int(trace.parent[row]))
        both = min(len(mine), len(theirs))
        differ = np.flatnonzero(mine[:both] != theirs[:both])
        same = int(differ[0]) if len(differ) else both
        out[k] = min(same * trace.block_tokens, int(trace.input_tokens[row]))
    return out


def fit_report(trace: Trace, description: Description) -> dict[str, Any]:
    """How close a draw of the same size comes to the trace: distances, and pairs of (real, drawn)."""
    drawn = synthesise(description)
    arrival, made = root_arrivals(trace), drawn.arrival_s[drawn.parent < 0]
    mean_gap = (float(arrival[-1] - arrival[0]) if len(arrival) else 0.0) / max(len(arrival) - 1, 1)
    window = 10 * mean_gap
    report: dict[str, Any] = {
        "input_tokens_ks": ks_distance(trace.input_tokens, drawn.input_tokens),
        "output_tokens_ks": ks_distance(trace.output_tokens, drawn.output_tokens),
        "mean_input_tokens": [float(trace.input_tokens.mean()), float(drawn.input_tokens.mean())],
        "mean_output_tokens": [float(trace.output_tokens.mean()), float(drawn.output_tokens.mean())],
        "rank_correlation": [
            rank_correlation(trace.input_tokens, trace.output_tokens),
            rank_correlation(drawn.input_tokens, drawn.output_tokens),
        ],
        "arrivals": description.arrivals.process,
        "rate_per_s": [rate(len(a), float(np.ptp(a)) if len(a) else 0.0) for a in (arrival, made)],
        "interarrival_cv": [gap_cv(arrival), gap_cv(made)],
        "gaps_ks": ks_distance(np.diff(arrival), np.diff(made)) if min(len(arrival), len(made)) > 1 else None,
        "dispersion_over_ten_gaps": [dispersion(arrival - arrival[0], window), dispersion(made, window)]
        if window > 0
        else None,
    }
    if description.prefixes is not None:
        report["block_reuse"] = [ideal_reuse(trace).blocks, ideal_reuse(drawn).blocks]
        real, synthetic = stack_distances(trace), stack_distances(drawn)
        sizes = [max(int(real.num_distinct * share), 1) for share in (0.01, 0.1, 0.5)]
        report["reuse_by_cache_blocks"] = {
            str(size): [real.hit_share(size), synthetic.hit_share(size)] for size in sizes
        }
    if description.sessions is not None:
        report["requests_a_session"] = [
            trace.num_requests / int((trace.parent < 0).sum()),
            drawn.num_requests / int((drawn.parent < 0).sum()),
        ]
        report["token_reuse"] = [ideal_reuse(trace).tokens, ideal_reuse(drawn).tokens]
    return report
