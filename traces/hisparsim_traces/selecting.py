"""Choosing rows of a trace without breaking its dependencies, and the invariants that must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .errors import TraceError
from .trace import Floats, Ints, LoadReport, Rows, Trace


def renumber(values: Ints) -> Ints:
    """Dense numbers in order of first appearance; negative values stay -1. [n] -> [n]"""
    out = np.full(len(values), -1, np.int64)
    valid = values >= 0
    if valid.any():
        _, first, inverse = np.unique(values[valid], return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        out[valid] = rank[inverse]
    return out


def gather_ranges(starts: Ints, lengths: Ints) -> Ints:
    """Indices of the concatenated ranges [start, start + length). [n], [n] -> [sum(lengths)]"""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    return np.asarray(np.arange(total) + np.repeat(starts - (ends - lengths), lengths), np.int64)


def select_rows(trace: Trace, rows: Rows) -> Trace:
    n = trace.num_requests
    index = np.arange(n)[rows]
    if len(index) > 1 and (np.diff(index) <= 0).any():
        raise TraceError("rows to select must be in increasing order, each once")
    new_row = np.full(n, -1, np.int64)
    new_row[index] = np.arange(len(index))

    parent = trace.parent[index]
    shared = trace.shared_prefix_tokens[index].copy()
    think = trace.think_s[index].copy()
    arrival = trace.arrival_s[index].copy()
    ancestor_arrival = arrival.copy()
    orphaned = (parent >= 0) & (new_row[np.maximum(parent, 0)] < 0)
    think[orphaned] = np.nan
    while True:  # one generation a pass
        missing = np.flatnonzero((parent >= 0) & (new_row[np.maximum(parent, 0)] < 0))
        if not len(missing):
            break
        gone = parent[missing]
        shared[missing] = np.minimum(shared[missing], trace.shared_prefix_tokens[gone])
        older = np.isnan(ancestor_arrival[missing])
        ancestor_arrival[missing[older]] = trace.arrival_s[gone[older]]
        parent[missing] = trace.parent[gone]
    shared[parent < 0] = 0
    roots = (parent < 0) & np.isnan(arrival)
    arrival[roots] = ancestor_arrival[roots]
    parent = np.where(parent >= 0, new_row[np.maximum(parent, 0)], -1)
    known = ~np.isnan(arrival)
    if known.any():
        arrival -= arrival[known].min()

    starts = trace.block_offsets[:-1][index]
    lengths = trace.block_offsets[1:][index] - starts
    session = renumber(trace.session[index])
    part = replace(
        trace,
        arrival_s=arrival,
        input_tokens=trace.input_tokens[index],
        output_tokens=trace.output_tokens[index],
        session=session,
        turn=trace.turn[index],
        parent=parent,
        think_s=think,
        shared_prefix_tokens=shared,
        block_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        block_ids=renumber(trace.block_ids[gather_ranges(starts, lengths)]),
        source_line=trace.source_line[index],
        kind=None if trace.kind is None else trace.kind.take(index),
        loading=_narrowed(trace.loading, n - len(index)),
    )
    roots = arrival[parent < 0]
    if (np.diff(roots) < 0).any():  # a row set free arrives before rows that stood in front of it
        return reordered(part, np.argsort(_arrival_keys(part), kind="stable"))
    return part


def _arrival_keys(trace: Trace) -> Floats:
    """Each row's arrival, but never before its parent's; a row without one takes its parent's. [n]"""
    key = np.where(np.isnan(trace.arrival_s), -np.inf, trace.arrival_s)
    for row in np.flatnonzero(trace.parent >= 0).tolist():
        key[row] = max(key[row], key[trace.parent[row]])
    return key


def reordered(trace: Trace, order: Ints) -> Trace:
    """The rows in another order that keeps parents before their children; arrivals start again at 0."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    starts, counts = trace.block_offsets[:-1][order], np.diff(trace.block_offsets)[order]
    parent = trace.parent[order]
    arrival = trace.arrival_s[order]
    return replace(
        trace,
        arrival_s=arrival - np.nanmin(arrival) if len(arrival) else arrival,
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
        session=renumber(trace.session[order]),
        turn=trace.turn[order],
        parent=np.where(parent >= 0, place[np.maximum(parent, 0)], -1),
        think_s=trace.think_s[order],
        shared_prefix_tokens=trace.shared_prefix_tokens[order],
        block_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        block_ids=renumber(trace.block_ids[gather_ranges(starts, counts)]),
        source_line=trace.source_line[order],
        kind=None if trace.kind is None else trace.kind.take(order),
    )


def _narrowed(loading: LoadReport, left_out: int) -> LoadReport:
    if not left_out:
        return loading
    dropped = dict(loading.rows_dropped)
    dropped["not selected"] = dropped.get("not selected", 0) + left_out
    return replace(loading, rows_kept=loading.rows_kept - left_out, rows_dropped=dropped)


def check_trace(trace: Trace, allow_zero_tokens: bool = False) -> None:
    n = trace.num_requests

    def require(holds: bool | np.bool_, rule: str) -> None:
        if not holds:
            raise TraceError(f"trace {trace.name!r} breaks an invariant: {rule}")

    for name in ("arrival_s", "output_tokens", "session", "turn", "parent", "think_s"):
        require(len(getattr(trace, name)) == n, f"{name} has {len(getattr(trace, name))} rows, not {n}")
    require(
        len(trace.shared_prefix_tokens) == n and len(trace.source_line) == n, f"every column has {n} rows"
    )
    require(trace.loading.rows_kept == n, f"the report keeps {trace.loading.rows_kept} rows, the trace {n}")
    require(len(trace.block_offsets) == n + 1, "block_offsets has n + 1 entries")
    if trace.kind is not None:
        names, codes = trace.kind.names, trace.kind.codes
        require(len(codes) == n, f"kind has {len(codes)} rows, not {n}")
        require(((codes >= -1) & (codes < len(names))).all(), "a kind's code is -1 or has a name")
        require(all(names) and len(set(names)) == len(names), "kinds have distinct names")
    least = 0 if allow_zero_tokens else 1
    require((trace.input_tokens >= least).all(), f"input_tokens >= {least}")
    require((trace.output_tokens >= least).all(), f"output_tokens >= {least}")

    rows = np.arange(n)
    has_parent = trace.parent >= 0
    require(
        (trace.parent >= -1).all() and (trace.parent < rows).all(), "a parent stands earlier than its child"
    )
    known = trace.arrival_s[~np.isnan(trace.arrival_s)]
    require(np.isfinite(known).all(), "arrivals are finite or NaN")
    require((has_parent | ~np.isnan(trace.arrival_s)).all(), "a row without a parent has an arrival")
    require(len(known) == 0 or known.min() == 0, "the first arrival is 0")
    roots = trace.arrival_s[~has_parent]
    require((np.diff(roots) >= 0).all(), "rows without a parent are in order of arrival")
    require(
        (np.isnan(trace.think_s) | (has_parent & (trace.think_s >= 0))).all(),
        "think_s >= 0, only with a parent",
    )
    require((trace.session >= -1).all() and (trace.turn >= 0).all(), "session >= -1, turn >= 0")
    require((renumber(trace.session) == trace.session).all(), "sessions are dense, in order of appearance")

    parents = trace.parent[has_parent]
    context = trace.input_tokens[parents] + trace.output_tokens[parents]
    shared = trace.shared_prefix_tokens
    require(
        (shared[~has_parent] == 0).all() and (shared >= 0).all(), "only a row with a parent shares a prefix"
    )
    require((shared[has_parent] <= context).all(), "a shared prefix lies within the parent's context")
    require((shared <= trace.input_tokens).all(), "a shared prefix lies within the prompt")

    counts = np.diff(trace.block_offsets)
    require(trace.block_offsets[0] == 0 and (counts >= 0).all(), "block offsets start at 0 and do not fall")
    require(
        trace.block_offsets[-1] == len(trace.block_ids), "the last block offset is the number of block ids"
    )
    require((trace.block_ids >= 0).all(), "block ids are dense, from 0")
    if trace.block_tokens is None:
        require(len(trace.block_ids) == 0, "no block ids without a block size")
    else:
        require(trace.block_tokens >= 1, "block_tokens >= 1")
        most = -(-trace.input_tokens // trace.block_tokens)
        require((counts <= most).all(), "no more block ids than the prompt has blocks")
