"""A description from a real trace: distributions only, no row of it."""

from __future__ import annotations

import numpy as np

from ..errors import TraceError
from ..reuse import leading_hits, previous_access
from ..trace import Ints, Trace
from .description import Description, Knots, LengthsLaw, Prefixes, ReuseBin, Root, Sessions, Shrinking
from .fit_arrivals import MIN_ROWS, fit_arrivals
from .samples import copula_correlation, knots

_MAX_ROOT_BLOCKS = 64


def fit(trace: Trace, *, seed: int = 0, name: str | None = None) -> Description:
    """The description a trace looks drawn from.

    Turns that wait for others make sessions; otherwise block ids make a prefix tree; otherwise there are only
    lengths and arrivals. Stamps that share coarse ticks are spread within them first.

    Raises:
        TraceError: fewer than 20 requests, which fix no distribution.
    """
    n = trace.num_requests
    if n < MIN_ROWS:
        raise TraceError(
            f"trace {trace.name!r} has {n} requests; at least {MIN_ROWS} are needed to fit anything"
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
