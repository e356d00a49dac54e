"""Goodput: the highest load at which a policy still meets a service level objective, found by bisection.

Load is an arrival rate (arrivals redrawn as a Poisson process, or the trace's own pattern stretched) or a
number of users in a closed loop. From a first guess it is doubled until it breaks the objective; if the
guess breaks it, the lightest load comes next, and if that does too the policy sustains none. Then the gap is
halved, on a logarithmic scale, until it is within the tolerance. Every seed is bisected by itself.

The interval ``ci95`` is Student's over the seeds' results, mean +- t(0.975, n - 1) s / sqrt(n), widened by
half the last gap on either side, since a bisection knows its result no better. One seed has no interval.

A run on a finite trace meets an objective more easily than an endless stream of the same rate would: a queue
that only grows is cut off where the trace ends. The longer the trace, the sharper the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace

from .columns import ERROR, Record
from .errors import SweepError
from .grid import Point
from .plan import plan_overrides
from .ranking import Constraint, violated
from .runner import Runner

TOLERANCE = 0.05
"""Rates: the gap between the load that holds and the one that does not, relative to the former."""
MAX_DOUBLINGS = 10
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 0.975 quantile, for 1 to 30 degrees of freedom (any table of it)."""


class Load(Enum):
    """What is raised until the objective breaks."""

    RATE = "rate"
    """Arrivals a second, redrawn as a Poisson process (``workload.rate_per_s``); seeds differ."""
    TRACE = "trace"
    """Arrivals a second with the trace's own pattern, stretched (``workload.time_scale``); one seed."""
    CONCURRENCY = "concurrency"
    """Users in a closed loop (``workload.concurrency``)."""


@dataclass(frozen=True)
class Goodput:
    """The load one policy sustains."""

    policy: str
    load: float
    """Mean over seeds; 0 where even the lightest load tried breaks the objective."""
    ci95: tuple[float, float] | None
    bound_by: str | None
    """What bound the run that broke the objective at the lightest such load."""
    violates: str | None
    """The objective it broke; None where nothing broke up to the heaviest load tried."""
    error: str | None
    by_seed: tuple[float, ...]
    num_rejected: int
    """Requests refused at the sustained load, the most over seeds."""


class Bisection:
    """The search of one policy and seed: the next load to try, until it is known well enough."""

    def __init__(self, start: float, *, whole: bool, limit: float, tolerance: float = TOLERANCE) -> None:
        self.holds: float | None = None
        self.breaks: float | None = None
        self._whole, self._limit, self._tolerance = whole, limit, tolerance
        self._floor = 1.0 if whole else start / 2**MAX_DOUBLINGS
        self.next: float | None = self._round(min(max(start, self._floor), limit))

    def tell(self, held: bool) -> None:
        """Change: take in how the load ``next`` went, and choose the next one (None: done)."""
        assert self.next is not None
        if held:
            self.holds = self.next
        else:
            self.breaks = self.next
        self.next = self._choose()

    @property
    def result(self) -> float:
        """Query: the highest load known to hold, 0 where none is."""
        return self.holds or 0.0

    @property
    def gap(self) -> float:
        """Query: from the load that holds to the one that does not."""
        return 0.0 if self.holds is None or self.breaks is None else self.breaks - self.holds

    def _choose(self) -> float | None:
        if self.breaks is None:
            assert self.holds is not None
            return None if self.holds >= self._limit else self._round(min(2 * self.holds, self._limit))
        if self.holds is None:
            return None if self.breaks <= self._floor else self._floor
        if self.breaks <= self.holds * (1 + self._tolerance) or (self._whole and self.gap <= 1):
            return None
        return self._round(math.sqrt(self.holds * self.breaks))

    def _round(self, load: float) -> float:
        if self._whole:
            between = math.floor(load)
            return float(between + 1 if self.holds is not None and between <= self.holds else between)
        return float(f"{load:.6g}")


@dataclass
class _Chain:
    policy: str
    seed: int
    search: Bisection
    held: Record | None = None
    broke: Record | None = None
    error: str | None = None


def find_goodput(
    base: Scenario,
    trace: Trace,
    policies: Sequence[str],
    slo: Sequence[Constraint],
    load: Load,
    seeds: Sequence[int],
    runner: Runner,
    trace_key: str,
    on_round: Callable[[int], None] | None = None,
) -> list[Goodput]:
    """Change: bisect every policy and seed, all their next loads at a time; the policies' goodput, in order.

    Args:
        on_round: told after each round how many searches are still open.

    Raises:
        SweepError: no objective, or a trace without arrival times whose pattern was to be stretched.
    """
    if not slo:
        raise SweepError("goodput needs an objective: --slo ttft_s.p99=10")
    if load is Load.TRACE or len(seeds) == 0:
        seeds = seeds[:1] or (base.seed,)
    start, limit = first_guess(trace, base, load)
    chains = [
        _Chain(policy, seed, Bisection(start, whole=load is Load.CONCURRENCY, limit=limit))
        for policy in policies
        for seed in seeds
    ]
    while open_chains := [chain for chain in chains if chain.search.next is not None and chain.error is None]:
        tasks = {}
        for i, chain in enumerate(open_chains):
            assert chain.search.next is not None
            overrides = [f"policy.name={chain.policy}", f"seed={chain.seed}"]
            overrides += settings(load, chain.search.next, trace)
            point = Point(trace_key, chain.seed, {})
            planned = plan_overrides(base, point, {trace_key: trace}, overrides)
            if planned.task is None:
                chain.error = planned.error
            else:
                tasks[i] = planned.task
        runner.run(list(tasks.values()))
        for i, task in tasks.items():
            chain, record = open_chains[i], runner.record(task)
            if record[ERROR] is not None:
                chain.error = str(record[ERROR])
                continue
            held = not violated(record, slo)
            chain.search.tell(held)
            if held:
                chain.held = record
            else:
                chain.broke = record
        if on_round is not None:
            on_round(sum(chain.search.next is not None and chain.error is None for chain in chains))
    return [summarise([chain for chain in chains if chain.policy == policy], slo) for policy in policies]


def settings(load: Load, value: float, trace: Trace) -> list[str]:
    """Query: the overrides that make a scenario offer this load."""
    if load is Load.CONCURRENCY:
        return [f"workload.concurrency={int(value)}"]
    if load is Load.RATE:
        return [f"workload.rate_per_s={value!r}", "workload.concurrency=null"]
    return [
        f"workload.time_scale={own_rate(trace) / value!r}",
        "workload.rate_per_s=null",
        "workload.concurrency=null",
    ]


def own_rate(trace: Trace) -> float:
    """Query: arrivals a second of the trace as recorded, turns that wait for another left out.

    Raises:
        SweepError: its arrivals span no time.
    """
    starts = trace.arrival_s[trace.parent < 0]
    span_s = float(starts.max() - starts.min()) if len(starts) else 0.0
    if not span_s > 0:
        raise SweepError(
            f"trace {trace.name!r} has no arrival times to stretch: use --load rate or --load concurrency"
        )
    return len(starts) / span_s


def first_guess(trace: Trace, base: Scenario, load: Load) -> tuple[float, float]:
    """Query: (the load to try first, the heaviest that makes sense)."""
    num_starts = int((trace.parent < 0).sum())
    if load is Load.CONCURRENCY:
        return float(min(8, num_starts)), float(min(num_starts, base.scheduler.max_num_seqs))
    if load is Load.TRACE:
        start = own_rate(trace)
        return start, start * 2**MAX_DOUBLINGS
    try:
        start = own_rate(trace)
    except SweepError:
        start = 1.0
    return start, start * 2**MAX_DOUBLINGS


def summarise(chains: Sequence[_Chain], slo: Sequence[Constraint]) -> Goodput:
    """Query: the goodput of one policy from the searches of its seeds."""
    errors = [chain.error for chain in chains if chain.error is not None]
    if errors:
        return Goodput(chains[0].policy, 0.0, None, None, None, errors[0], (), 0)
    results = [chain.search.result for chain in chains]
    broke = [chain for chain in chains if chain.broke is not None]
    first = min(broke, key=lambda chain: chain.search.breaks or math.inf) if broke else None
    record: Record = (first.broke if first is not None else chains[0].held) or {}
    broken = violated(record, slo)
    rejected = [chain.held.get("num_rejected") for chain in chains if chain.held is not None]
    return Goodput(
        policy=chains[0].policy,
        load=sum(results) / len(results),
        ci95=interval(results, max(chain.search.gap for chain in chains)),
        bound_by=str(record["bound_by"]) if record.get("bound_by") is not None else None,
        violates=str(broken[0]) if broken else None,
        error=None,
        by_seed=tuple(results),
        num_rejected=max((value for value in rejected if isinstance(value, int)), default=0),
    )


def interval(results: Sequence[float], gap: float) -> tuple[float, float] | None:
    """Query: the 95 % interval of the mean over seeds, half a gap wider on either side; None for one seed."""
    n = len(results)
    if n < 2:
        return None
    mean = sum(results) / n
    deviation = math.sqrt(sum((result - mean) ** 2 for result in results) / (n - 1))
    t = _T_975[min(n - 1, len(_T_975)) - 1]
    half = t * deviation / math.sqrt(n) + gap / 2
    return max(mean - half, 0.0), mean + half
