"""A recommendation in plain words."""

from __future__ import annotations

from collections.abc import Iterable

from .identity import reads_host_pool, reads_offload_tier
from .ranking import Constraint, violated
from .recommend import CHUNK_KEY, SAME, Move, Recommendation, Tried

_BINDS = {
    "gpu_blocks": "GPU memory for KV binds: requests wait for blocks",
    "host_blocks": "the host pool binds: requests wait for host blocks",
    "pcie": "PCIe binds: steps wait for transfers",
    "compute": "compute binds: work waits for its turn in the batch",
    "arrivals": "nothing binds: the arrivals set the pace",
}


def sentences(found: Recommendation) -> list[str]:
    """Query: the answer, one sentence after another."""
    best = found.best
    told = [f"Use policy {best.policy}: {settings(best)}."]
    told.append(
        f"It serves {_metric(best, 'output_tokens_per_s')} output tokens/s with TTFT p50 "
        f"{_metric(best, 'ttft_s.p50')} s and p99 {_metric(best, 'ttft_s.p99')} s, TPOT p50 "
        f"{_metric(best, 'tpot_s.p50', 1e3)} ms."
    )
    told.append(_margin(found))
    bound = str(best.record["bound_by"])
    told.append(
        f"{_BINDS.get(bound, bound + ' binds')[:1].upper()}{_BINDS.get(bound, bound + ' binds')[1:]}."
    )
    told += [_against(found, other) for other in found.others]
    told += [_moved(found, move) for move in found.moves]
    told += [f"Policy {policy} cannot run here: {error}." for policy, error in found.failed]
    return told


def settings(tried: Tried) -> str:
    """Query: the sizes that matter for the policy, in words."""
    scenario = tried.scenario
    words: list[str] = []
    if reads_host_pool(tried.policy):
        words.append(f"{scenario.hot_rows} hot rows a request")
        words.append(f"a host pool of {scenario.host_pool_gib:g} GiB")
    elif reads_offload_tier(tried.policy):
        words.append(f"an offload tier of {scenario.prefix_offload_gib:g} GiB")
    words.append(f"at most {scenario.scheduler.max_num_seqs} running requests")
    words.append(f"{scenario.scheduler.max_num_batched_tokens} tokens a step")
    return ", ".join(words)


def _margin(found: Recommendation) -> str:
    if found.broken:
        broken = _with_values(found.best, found.broken)
        return f"Nothing that was tried meets the objectives; this comes nearest, but breaks {broken}."
    tightest = found.tightest
    if tightest is not None:
        margin = found.margin or 0.0
        told = _with_values(found.best, [tightest])
        return f"It meets every objective; the tightest is {told}, {margin:.0%} inside."
    return "No objective was set, so the configuration with the most output tokens/s was chosen."


def _with_values(tried: Tried, constraints: Iterable[Constraint]) -> str:
    """Query: constraints, each with the value that a run has."""
    told = [f"{constraint} with {_metric(tried, constraint.metric)}" for constraint in constraints]
    return " and ".join(told)


def _breaks(found: Recommendation, tried: Tried) -> str:
    broken = violated(tried.record, found.slo)
    return f", and breaks {_with_values(tried, broken)}" if broken else ""


def _against(found: Recommendation, other: Tried) -> str:
    mine, theirs = found.best.number("output_tokens_per_s"), other.number("output_tokens_per_s")
    if mine is None or theirs is None:
        return f"Policy {other.policy} finished nothing."
    change = theirs / mine - 1
    rate = "about the same throughput" if abs(change) <= SAME else f"{change:+.0%} throughput"
    chunk = other.values.get(CHUNK_KEY)
    at = f" (at {chunk} tokens a step)" if chunk != found.best.values.get(CHUNK_KEY) else ""
    return (
        f"The best of {other.policy}{at} gives {rate}, TTFT p99 {_metric(other, 'ttft_s.p99')} s and "
        f"TPOT p50 {_metric(other, 'tpot_s.p50', 1e3)} ms{_breaks(found, other)}."
    )


def _moved(found: Recommendation, move: Move) -> str:
    before, after = found.best.number("output_tokens_per_s"), move.tried.number("output_tokens_per_s")
    what = f"{move.what[:1].upper()}{move.what[1:]}"
    value = f"{move.value:g}" if isinstance(move.value, int | float) else str(move.value)
    if not move.is_load:
        what = f"{what} ({value})"
    if before is None or after is None:
        return f"{what}: nothing finishes."
    change = after / before - 1
    effect = "no change in throughput" if abs(change) <= SAME else f"{change:+.0%} throughput"
    return f"{what}: {effect}, TTFT p99 {_metric(move.tried, 'ttft_s.p99')} s{_breaks(found, move.tried)}."


def _metric(tried: Tried, name: str, scale: float = 1.0) -> str:
    value = tried.number(name)
    return "none" if value is None else f"{value * scale:.3g}"
