"""The arrival law that a trace's stamps look drawn from."""

from __future__ import annotations

import numpy as np

from ..draws import gaps as draw_gaps
from ..draws import stream
from ..replay import spread_ties
from ..statistics import dispersion, gap_cv
from ..trace import Floats, Trace
from .description import Arrivals
from .draw import draw_arrivals
from .samples import ks_distance

MIN_ROWS = 20  # fewer fix no distribution
_PROFILE_STEPS = 20


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
    if span <= 0 or len(arrival) < MIN_ROWS:
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
