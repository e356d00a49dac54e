"""What a trace is, in numbers: lengths, arrivals, burstiness, reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .files import exists
from .policies import ZERO_REASONS
from .reuse import StackDistances, ideal_reuse, stack_distances
from .trace import Floats, Ints, Trace

WINDOWS_S = (1, 10, 60)
CONTEXT_MARKS = {"32k": 32_768, "128k": 131_072, "200k": 200_000}
CURVE_POINTS = 12
LARGE_BYTES = 64 << 20


def file_info(
    source: str | Path,
    *,
    reuse_sample: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """The statistics of a file (or bundled trace) as plain JSON values.

    `rows_read`, `sum_input_tokens`, `sum_output_tokens`, `span_s`, `rate_per_s`, `interarrival_cv`,
    `burstiness` and the ideal reuse describe the file as recorded: readable rows with zero tokens count,
    since failed requests arrived too. `num_requests`, the length figures, `kept` and the reuse by cache
    size describe what is kept. Formats without block ids, and large files of the others, are read in a
    stream, in bounded memory.

    Args:
        options: format, strict, limit, columns, ... as `load` takes them.
    Raises:
        TraceError: as `load`.
    """
    from .loading import apply_zero_tokens, choose_format, load
    from .streaming import stream_info

    if not 0 < reuse_sample <= 1:
        raise TraceError(f"sample {reuse_sample}: a share of the ids above 0 and at most 1")
    path = Path(source)
    if exists(path):
        chosen = choose_format(path, options.get("format"), options.get("columns"))
        large = (
            chosen.block_rule not in (None, "given") and path.is_file() and path.stat().st_size > LARGE_BYTES
        )
        streams = chosen.block_rule is None or (large and reuse_sample == 1.0)
        if streams and not chosen.own_clocks and not path.is_dir() and not options.get("limit"):
            return stream_info(
                path, chosen, **{k: v for k, v in options.items() if k not in ("format", "limit")}
            )
    limit = options.pop("limit", None)
    if limit is not None:  # so many kept ones, and the rows without tokens among them
        first = load(source, limit=limit, **options)
        limit = first.num_requests + sum(first.loading.rows_dropped.get(reason, 0) for reason in ZERO_REASONS)
    recorded = load(source, zero_tokens="keep", limit=limit, **options)
    kept = apply_zero_tokens(recorded, "drop", bool(options.get("strict")), path)
    return trace_info(recorded, kept, reuse_sample=reuse_sample)


def trace_info(recorded: Trace, kept: Trace | None = None, *, reuse_sample: float = 1.0) -> dict[str, Any]:
    """The statistics of a trace in memory; `kept` is it without the rows that will not be replayed."""
    kept = recorded if kept is None else kept
    report, offered = kept.loading, recorded.loading.offered
    reuse = ideal_reuse(recorded)
    known = np.sort(recorded.arrival_s[~np.isnan(recorded.arrival_s)])
    span_s = recorded.span_s
    num_offered = recorded.num_requests
    context = kept.input_tokens + kept.output_tokens
    info: dict[str, Any] = {
        "name": kept.name,
        "format": kept.format,
        "sha256": kept.sha256,
        "rows_read": report.rows_read,
        "rows_kept": report.rows_kept,
        "rows_dropped": dict(report.rows_dropped),
        "rows_changed": dict(report.changed),
        "inversions": report.inversions,
        "ties": report.ties,
        "notes": list(report.notes),
        "num_requests": kept.num_requests,
        "sum_input_tokens": recorded.sum_input_tokens,
        "sum_output_tokens": recorded.sum_output_tokens,
        "span_s": span_s,
        "rate_per_s": rate(num_offered, span_s),
        "interarrival_cv": None if offered is None else gap_cv(known),
        "burstiness": {f"{window}s": dispersion(known, window) for window in WINDOWS_S},
        "block_tokens": kept.block_tokens,
        "ideal_block_reuse": reuse.blocks,
        "ideal_token_reuse": reuse.tokens,
        "num_sessions": kept.num_sessions,
        "kinds": None if kept.kind is None else kept.kind.counts(),
        "input_tokens": lengths(kept.input_tokens),
        "output_tokens": lengths(kept.output_tokens),
        "share_above": {mark: float((context > limit).mean()) for mark, limit in CONTEXT_MARKS.items()},
        "kept": {
            "sum_input_tokens": kept.sum_input_tokens,
            "sum_output_tokens": kept.sum_output_tokens,
            "span_s": kept.span_s,
            "rate_per_s": rate(kept.num_requests, kept.span_s),
        },
        "reuse_by_cache": reuse_curve(kept, sample=reuse_sample),
    }
    return info


def lengths(values: Ints) -> dict[str, float]:
    """p50, p90, p99 (linear between order statistics), max and mean."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(values.max()),
        "mean": float(values.mean()),
    }


def rate(num_requests: int, span_s: float) -> float | None:
    """Requests over span, None where all arrive at once."""
    return num_requests / span_s if span_s > 0 else None


def gap_cv(arrival_s: Floats) -> float | None:
    """Coefficient of variation of the gaps between sorted arrivals."""
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None


def dispersion(arrival_s: Floats, window_s: float) -> float | None:
    """Variance over mean of the counts in whole windows (1 for Poisson); None for under two windows."""
    if not len(arrival_s):
        return None
    since = arrival_s - arrival_s[0]
    num_windows = int(since[-1] // window_s)
    if num_windows < 2:
        return None
    index, counts = np.unique((since // window_s).astype(np.int64), return_counts=True)
    counts = counts[index < num_windows].astype(np.float64)
    mean = float(counts.sum()) / num_windows
    return float((counts**2).sum()) / num_windows / mean - mean if mean > 0 else None


def reuse_curve(trace: Trace, *, sample: float = 1.0) -> dict[str, Any] | None:
    """LRU hit shares by cache size; None without block ids."""
    if trace.block_tokens is None or not len(trace.block_ids):
        return None
    return curve_of(stack_distances(trace, sample=sample), trace.block_tokens)


def curve_of(stack: StackDistances, block_tokens: int) -> dict[str, Any]:
    """LRU hit shares at cache sizes spaced evenly by ratio."""
    most = max(int(stack.num_distinct / stack.sample), 1)
    sizes = sorted({int(size) for size in np.rint(np.geomspace(min(64, most), most, CURVE_POINTS))})
    return {
        "exact": stack.sample == 1.0,
        "sample": stack.sample,
        "cache_blocks": sizes,
        "cache_tokens": [size * block_tokens for size in sizes],
        "hit_share": [stack.hit_share(size) for size in sizes],
    }
