"""How close a draw from a description comes to the trace it was fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reuse import ideal_reuse, stack_distances
from ..statistics import dispersion, gap_cv, rate
from ..trace import Trace
from .description import Description
from .draw import synthesise
from .fit_arrivals import root_arrivals
from .samples import ks_distance, rank_correlation


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
