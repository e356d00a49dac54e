"""What happens to rows a server cannot take: none of it silently."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError
from .selecting import gather_ranges, renumber, select_rows
from .trace import Ints, Trace

ZeroTokens = Literal["drop", "error", "keep"]
OverLong = Literal["reject", "skip", "truncate", "skip-session"]


ZERO_REASONS = ("zero input and output tokens", "zero input tokens", "zero output tokens")


def is_zero(input_tokens: Ints, output_tokens: Ints) -> NDArray[np.bool_]:
    """Rows without a prompt or without an output. [n]"""
    return np.asarray((input_tokens == 0) | (output_tokens == 0))


def zero_rows(input_tokens: Ints, output_tokens: Ints) -> dict[str, Ints]:
    """The rows without a prompt, an output or both, by reason; reasons without rows are left out."""
    no_input, no_output = input_tokens == 0, output_tokens == 0
    masks = (no_input & no_output, no_input & ~no_output, ~no_input & no_output)
    return {
        reason: np.flatnonzero(rows) for reason, rows in zip(ZERO_REASONS, masks, strict=True) if rows.any()
    }


def apply_over_long(
    trace: Trace, max_context: int | None, policy: OverLong, strict: bool, path: Path | None = None
) -> Trace:
    """The trace without rows above `max_context` prompt plus output tokens, by policy.

    Raises:
        TraceError: policy "reject" (or strict) and a longer row; no row fits; or a bad argument.
    """
    if policy not in ("reject", "skip", "truncate", "skip-session"):
        raise TraceError(f"over_long {policy!r}: one of reject, skip, truncate, skip-session")
    if max_context is None:
        return trace
    if max_context < 2:
        raise TraceError(
            f"max_context_tokens {max_context}: must hold a prompt and an output token, at least 2"
        )
    context = trace.input_tokens + trace.output_tokens
    over = context > max_context
    if not over.any():
        return trace
    name = path or trace.name
    if policy == "reject" or strict:
        row = int(np.flatnonzero(over)[0])
        raise TraceError(
            f"{int(over.sum())} of {len(context)} requests exceed max_context_tokens {max_context} "
            f"(this one: {trace.input_tokens[row]} + {trace.output_tokens[row]}; the longest: "
            f"{context.max()}; the smallest window that admits any: {context.min()}): raise the window, or "
            "choose skip, truncate or skip-session",
            path=name,
            line=int(trace.source_line[row]),
        )
    if policy == "truncate":
        return _truncated(trace, max_context, name)
    if policy == "skip-session":
        sessions = np.unique(trace.session[over])
        drop = over | np.isin(trace.session, sessions[sessions >= 0])
    else:
        drop = over
    if drop.all():
        raise TraceError(
            f"no request is left under max_context_tokens {max_context}; the smallest window that admits any "
            f"is {context.min()}",
            path=name,
        )
    reasons = Counter({"over max_context_tokens": int(over.sum())})
    reasons["session holds a row over max_context_tokens"] += int((drop & ~over).sum())
    return _without(trace, drop, +reasons)


def _without(trace: Trace, drop: NDArray[np.bool_], reasons: Counter[str]) -> Trace:
    kept = select_rows(trace, ~drop)
    dropped = Counter(trace.loading.rows_dropped)
    dropped.update(reasons)
    return replace(
        kept, loading=replace(trace.loading, rows_kept=kept.num_requests, rows_dropped=dict(dropped))
    )


def _truncated(trace: Trace, max_context: int, name: Path | str) -> Trace:
    """Prompts cut at their end so that prompt plus output fit; rows whose output fills the window go."""
    hopeless = trace.output_tokens >= max_context
    if hopeless.all():
        raise TraceError(
            f"every request's output alone fills max_context_tokens {max_context}; the shortest output is "
            f"{trace.output_tokens.min()}",
            path=name,
        )
    if hopeless.any():
        trace = _without(
            trace, hopeless, Counter({"output alone over max_context_tokens": int(hopeless.sum())})
        )
    inputs = np.minimum(trace.input_tokens, max_context - trace.output_tokens)
    cut = inputs < trace.input_tokens
    shared = np.minimum(trace.shared_prefix_tokens, inputs)
    cut_parent = (trace.parent >= 0) & cut[np.maximum(trace.parent, 0)]
    # behind a cut prompt the parent's output stands elsewhere: only what is left of its prompt is shared
    shared = np.where(cut_parent, np.minimum(shared, inputs[np.maximum(trace.parent, 0)]), shared)

    offsets, ids = trace.block_offsets, trace.block_ids
    if trace.block_tokens is not None:
        counts = np.diff(offsets)
        fitting = np.where(cut, np.minimum(counts, inputs // trace.block_tokens), counts)
        ids = renumber(ids[gather_ranges(offsets[:-1], fitting)])
        offsets = np.concatenate([[0], np.cumsum(fitting)]).astype(np.int64)
    changed = Counter(trace.loading.changed)
    changed["prompt truncated to max_context_tokens"] += int(cut.sum())
    return replace(
        trace,
        input_tokens=inputs,
        shared_prefix_tokens=shared,
        block_offsets=offsets,
        block_ids=ids,
        loading=replace(trace.loading, changed=dict(changed)),
    )
