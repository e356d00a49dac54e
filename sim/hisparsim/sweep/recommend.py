"""From a trace and an objective to one configuration: which, by how much, what binds, and what moves it.

First every policy at the base scenario's sizes and with smaller prefill chunks; then the sizes of the best
are moved one at a time, and a size that helps is kept (twice at most). The last round of moves, with a
lighter and a heavier load beside it, is the sensitivity that is reported.

Better means: meets the objectives (or breaks them least); then more output tokens a second, then lower mean
TPOT, then lower TTFT p99, each only where the difference exceeds ``SAME``; then the simpler policy, since
equal results do not pay for a host tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import MAX_HOT_ROWS
from hisparsim_traces import Trace

from .axes import POLICY_KEY, Value, override
from .columns import ERROR, Cell, Record
from .errors import SweepError
from .goodput import own_rate
from .grid import Point
from .identity import reads_host_pool, reads_offload_tier
from .plan import plan_overrides
from .ranking import Constraint, violated
from .runner import Runner
from .task import Task

SAME = 0.02
"""Relative differences up to this do not count."""
MAX_MOVES = 2
MIN_CHUNK = 2048
CHUNK_SHARE = 4
"""Prefill chunks of a quarter are tried beside the base scenario's."""
LOAD_STEP = 1.25
CRITERIA = (("output_tokens_per_s", True), ("tpot_s.mean", False), ("ttft_s.p99", False))
"""Metric, and whether more of it is better, in the order in which they decide."""
SIMPLEST_FIRST = ("gpu-only", "prefix-offload", "host-resident", "hybrid-spill", "hybrid")
CHUNK_KEY = "scheduler.max_num_batched_tokens"


@dataclass(frozen=True)
class Tried:
    """A configuration and what its run gave."""

    values: Mapping[str, Value]
    """What it changes in the base scenario; the policy's name among it."""
    scenario: Scenario
    record: Record

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.scenario.policy.name

    def number(self, metric: str) -> float | None:
        """Query: a metric's value, None where it has none."""
        value: Cell = self.record.get(metric)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Move:
    """One setting of the recommended configuration, moved."""

    what: str
    key: str
    value: Value
    tried: Tried
    is_load: bool = False


@dataclass(frozen=True)
class Recommendation:
    """The answer, and what it was compared with."""

    best: Tried
    slo: tuple[Constraint, ...]
    broken: tuple[Constraint, ...]
    """Objectives that even the best does not meet."""
    others: tuple[Tried, ...]
    """The best of each other policy, best first."""
    moves: tuple[Move, ...]
    failed: tuple[tuple[str, str], ...] = field(default_factory=tuple)
    """(policy, error) of policies that could not run."""

    @property
    def margin(self) -> float | None:
        """Room to the tightest objective, as a share; without objectives the lead over the next best."""
        if self.slo:
            return min(-constraint.excess(self.best.record) for constraint in self.slo)
        return self.lead

    @property
    def tightest(self) -> Constraint | None:
        """The objective with the least room, None where there are none."""
        return max(self.slo, key=lambda one: one.excess(self.best.record)) if self.slo else None

    @property
    def lead(self) -> float | None:
        """Output tokens a second beyond those of the best other policy, as a share of the latter's."""
        mine = self.best.number("output_tokens_per_s")
        theirs = self.others[0].number("output_tokens_per_s") if self.others else None
        return mine / theirs - 1 if mine is not None and theirs else None


class Trials:
    """Runs configurations of one base scenario over one trace."""

    def __init__(self, base: Scenario, trace: Trace, trace_key: str, runner: Runner) -> None:
        self.base, self.trace, self._key, self._runner = base, trace, trace_key, runner

    def run(self, configurations: Sequence[Mapping[str, Value]]) -> list[Tried | str]:
        """Change: run configurations; each with its record, or why it cannot be run."""
        tasks: list[Task | str] = []
        for values in configurations:
            overrides = [override(key, value) for key, value in values.items()]
            planned = plan_overrides(
                self.base, Point(self._key, None, values), {self._key: self.trace}, overrides
            )
            tasks.append(planned.task if planned.task is not None else planned.error or "cannot be run")
        self._runner.run([task for task in tasks if isinstance(task, Task)])
        tried: list[Tried | str] = []
        for values, task in zip(configurations, tasks, strict=True):
            if isinstance(task, str):
                tried.append(task)
                continue
            record = self._runner.record(task)
            error = record[ERROR]
            tried.append(Tried(values, task.scenario, record) if error is None else str(error))
        return tried


def recommend(
    trials: Trials, policies: Sequence[str], slo: Sequence[Constraint], fixed: Iterable[str] = ()
) -> Recommendation:
    """Change: run the search; the recommendation.

    Args:
        fixed: scenario keys that must stay as they are in the base scenario.

    Raises:
        SweepError: no policy could be run.
    """
    kept = frozenset(fixed)
    base = trials.base
    chunks = [base.scheduler.max_num_batched_tokens]
    small = max(chunks[0] // CHUNK_SHARE, MIN_CHUNK, base.scheduler.max_num_seqs * base.query_len)
    if small < chunks[0] and CHUNK_KEY not in kept:
        chunks.append(small)
    first: list[dict[str, Value]] = [
        {POLICY_KEY: policy, CHUNK_KEY: chunk} for policy in policies for chunk in chunks
    ]
    outcomes = trials.run(first)
    tried = [outcome for outcome in outcomes if isinstance(outcome, Tried)]
    failed = {str(v[POLICY_KEY]): o for v, o in zip(first, outcomes, strict=True) if isinstance(o, str)}
    if not tried:
        policy, error = next(iter(failed.items()))
        raise SweepError(f"no policy can be run here; {policy}: {error}")
    best = choose(tried, slo)
    for _ in range(MAX_MOVES):
        moves = _moved(trials, best, kept)
        better = choose([best, *(move.tried for move in moves if not move.is_load)], slo)
        if better is best:
            break
        best = better
    else:
        moves = _moved(trials, best, kept)
    others: list[Tried] = []
    rest = [one for one in tried if one.policy != best.policy]
    while rest:
        others.append(choose(rest, slo))
        rest = [one for one in rest if one.policy != others[-1].policy]
    return Recommendation(
        best,
        tuple(slo),
        violated(best.record, slo),
        tuple(others),
        tuple(moves),
        tuple((policy, error) for policy, error in failed.items() if all(policy != t.policy for t in tried)),
    )


def choose(tried: Sequence[Tried], slo: Sequence[Constraint]) -> Tried:
    """Query: the best configuration, as the module's docstring defines it; the earliest of equals."""
    excess = [sum(max(constraint.excess(one.record), 0.0) for constraint in slo) for one in tried]
    least = min(excess)
    pool = [one for one, over in zip(tried, excess, strict=True) if over <= least]
    for metric, more in CRITERIA:
        known = [(value, one) for one in pool if (value := one.number(metric)) is not None]
        if not known:
            continue
        extreme = (max if more else min)(value for value, _ in known)
        limit = extreme * (1 - SAME) if more else extreme * (1 + SAME)
        pool = [one for value, one in known if (value >= limit if more else value <= limit)]
    return min(pool, key=lambda one: _complexity(one.policy))


def _complexity(policy: str) -> int:
    return SIMPLEST_FIRST.index(policy) if policy in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def _moved(trials: Trials, best: Tried, kept: frozenset[str]) -> list[Move]:
    """Change: run the neighbours of a configuration, and itself under a lighter and a heavier load."""
    wanted = [(what, key, value, False) for what, key, value in _neighbours(best.scenario) if key not in kept]
    wanted += [(what, key, value, True) for what, key, value in _loads(best.scenario, trials.trace)]
    outcomes = trials.run([{**best.values, key: value} for _, key, value, _ in wanted])
    return [
        Move(what, key, value, outcome, is_load)
        for (what, key, value, is_load), outcome in zip(wanted, outcomes, strict=True)
        if isinstance(outcome, Tried)
    ]


def _neighbours(scenario: Scenario) -> list[tuple[str, str, Value]]:
    policy, scheduler = scenario.policy.name, scenario.scheduler
    moves: list[tuple[str, str, Value]] = []
    if reads_host_pool(policy):
        rows, pool = scenario.hot_rows, scenario.host_pool_gib
        least = scenario.query_len * scenario.model_spec.index_top_k
        if 2 * rows <= MAX_HOT_ROWS:
            moves.append(("twice the hot rows", "kv.hot_rows", 2 * rows))
        if rows // 2 >= least:
            moves.append(("half the hot rows", "kv.hot_rows", rows // 2))
        moves.append(("half the host pool", "kv.host_pool_gib", pool / 2))
        moves.append(("twice the host pool", "kv.host_pool_gib", pool * 2))
    elif reads_offload_tier(policy):
        moves.append(("half the offload tier", "kv.prefix_offload_gib", scenario.prefix_offload_gib / 2))
    moves.append(
        ("half as many running requests", "scheduler.max_num_seqs", max(scheduler.max_num_seqs // 2, 1))
    )
    chunk = scheduler.max_num_batched_tokens
    if chunk // 2 >= max(MIN_CHUNK, scheduler.max_num_seqs * scenario.query_len):
        moves.append(("half the prefill chunk", CHUNK_KEY, chunk // 2))
    return moves


def _loads(scenario: Scenario, trace: Trace) -> list[tuple[str, str, Value]]:
    workload = scenario.workload
    if workload.concurrency is not None:
        users = workload.concurrency
        fewer, more = round(users / LOAD_STEP), round(users * LOAD_STEP)
        moves: list[tuple[str, str, Value]] = [(f"{fewer} users", "workload.concurrency", max(fewer, 1))]
        if more <= int((trace.parent < 0).sum()):
            moves.append((f"{more} users", "workload.concurrency", more))
        return moves
    less, greater = "a load of 80 %", "a load of 125 %"
    if workload.rate_per_s is not None:
        key, rate = "workload.rate_per_s", workload.rate_per_s
        return [(less, key, rate / LOAD_STEP), (greater, key, rate * LOAD_STEP)]
    try:
        own_rate(trace)
    except SweepError:
        return []
    key = "workload.time_scale"
    return [(less, key, workload.time_scale * LOAD_STEP), (greater, key, workload.time_scale / LOAD_STEP)]
