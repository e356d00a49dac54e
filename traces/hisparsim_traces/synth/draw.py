"""Drawing a trace from a description."""

from __future__ import annotations

import numpy as np

from ..draws import by_knots, exponential, gaps, normal_cdf, normal_pair, stream
from ..trace import Floats, Ints, Trace
from .assemble import synthetic_trace
from .description import Arrivals, Description, LengthsLaw, Prefixes

_NEAR = 64


def synthesise(
    description: Description, *, seed: int | None = None, num_requests: int | None = None
) -> Trace:
    """A trace drawn from a description; the same description and seed give the same trace."""
    seed = description.seed if seed is None else seed
    n = description.num_requests if num_requests is None else num_requests
    if description.sessions is not None:
        return _draw_sessions(description, seed, n)
    arrival = draw_arrivals(description.arrivals, n, seed)
    inputs, outputs = draw_lengths(description.lengths, n, seed)
    blocks = None if description.prefixes is None else draw_blocks(description.prefixes, inputs, seed)
    return synthetic_trace(description.name, arrival, inputs, outputs, blocks=blocks)


def draw_arrivals(law: Arrivals, n: int, seed: int) -> Floats:
    """Arrival times in seconds, not falling. [n]"""
    if law.process == "at-once":
        return np.zeros(n)
    rng = stream(seed, "arrivals")
    if law.process == "on-off":
        duty = law.on_s / (law.on_s + law.off_s)
        busy = (
            np.cumsum(exponential(rng.random(n))) * duty / law.rate_per_s
        )  # clock that stands still in silences
        num_bursts = int(busy[-1] / law.on_s * 2) + 64
        bursts = np.cumsum(exponential(stream(seed, "bursts").random(num_bursts)) * law.on_s)
        while bursts[-1] < busy[-1]:  # rare: the drawn bursts were short
            bursts = np.append(bursts, bursts[-1] + law.on_s)
        silences = np.cumsum(exponential(stream(seed, "silences").random(len(bursts))) * law.off_s)
        before = np.searchsorted(bursts, busy)
        times = busy + np.where(before > 0, silences[np.maximum(before - 1, 0)], 0.0)
    else:
        times = np.cumsum(gaps(rng, n, law.process, law.cv)) / law.rate_per_s
    return _warped(times, law.profile)


def _warped(times: Floats, profile: list[tuple[float, float]]) -> Floats:
    """Times of a unit-factor process under a stepwise rate: the k-th arrival comes when the rate's integral
    is times[k].
    """
    if not profile:
        return times
    starts = np.array([start for start, _ in profile])
    factors = np.array([factor for _, factor in profile])
    reached = np.concatenate([[0.0], np.cumsum(np.diff(starts) * factors[:-1])])
    step = np.searchsorted(reached, times, side="right") - 1
    return np.asarray(starts[step] + (times - reached[step]) / factors[step])


def draw_lengths(law: LengthsLaw, n: int, seed: int) -> tuple[Ints, Ints]:
    """Prompt and output tokens, at least 1 each. [n], [n]"""
    first, second = normal_pair(stream(seed, "lengths"), n, law.correlation)
    inputs = by_knots(normal_cdf(first), law.input_tokens)
    outputs = by_knots(normal_cdf(second), law.output_tokens)
    return _tokens(inputs), _tokens(outputs)


def _tokens(values: Floats) -> Ints:
    return np.asarray(np.maximum(np.rint(values), 1), np.int64)


def draw_blocks(law: Prefixes, inputs: Ints, seed: int) -> tuple[int, Ints, Ints]:
    """(block_tokens, block_offsets, block_ids): a prompt continues an earlier one's blocks, or a root."""
    n = len(inputs)
    size = law.block_tokens
    counts = -(-inputs // size)
    rng = stream(seed, "prefixes")
    bounds = np.array([bin.up_to_tokens for bin in law.reuse])
    which = np.minimum(np.searchsorted(bounds, inputs), len(bounds) - 1)
    uniform = rng.random(n)
    back = np.maximum(np.rint(by_knots(rng.random(n), law.recency_requests)), 1).astype(np.int64)
    has_past = back <= np.arange(n)
    # prompts whose source would lie before the first request share nothing; the others make up for them
    uniform = 1 - (1 - uniform) * max(float(has_past.mean()), 1e-9)
    shared = np.zeros(n)
    for index, bin in enumerate(law.reuse):
        shared[which == index] = by_knots(uniform[which == index], bin.shared)
    whole = inputs // size  # the partial last block is never another prompt's whole one
    shared[~has_past] = 0.0
    pick = rng.random(n)

    next_id = 0
    roots: list[list[int]] = []
    limits: list[float] = []
    for root in law.roots:
        roots.append(list(range(next_id, next_id + root.blocks)))
        next_id += root.blocks
        limits.append((limits[-1] if limits else 0.0) + root.share)

    rows: list[list[int]] = []
    last: dict[int, int] = {}  # the request that had a block last
    for row in range(n):
        count = int(counts[row])
        known = next((begin for begin, limit in zip(roots, limits, strict=True) if pick[row] < limit), [])
        ids = known[: int(whole[row])]
        want = len(ids) + round(float(shared[row]) * (int(whole[row]) - len(ids)))
        if want > len(ids):
            donor = _donor(whole, row, int(back[row]), want, rows, last)
            if donor is not None:
                ids = rows[donor][:want]
        fresh = count - len(ids)
        rows.append(ids + list(range(next_id, next_id + fresh)))
        next_id += fresh
        last.update(dict.fromkeys(rows[-1], row))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return size, offsets, np.array([block for ids in rows for block in ids], np.int64)


def _donor(
    whole: Ints, row: int, back: int, want: int, rows: list[list[int]], last: dict[int, int]
) -> int | None:
    """The earlier request nearest to `back` requests ago that has enough whole blocks and had them last of
    all.
    """
    able = np.flatnonzero(whole[:row] >= want)
    if not len(able):
        return None
    target = max(row - back, 0)
    middle = int(np.searchsorted(able, target))
    near = able[max(middle - _NEAR, 0) : middle + _NEAR]
    near = near[np.argsort(np.abs(near - target), kind="stable")]
    for candidate in near.tolist():
        if last[rows[candidate][want - 1]] == candidate:
            return int(candidate)
    return int(near[0])


def _draw_sessions(description: Description, seed: int, n: int) -> Trace:
    """Sessions until n requests are there; the last may be cut short."""
    law = description.sessions
    assert law is not None
    lengths = description.lengths
    rng = stream(seed, "sessions")
    turns = np.maximum(np.rint(by_knots(rng.random(n), law.turns)), 1).astype(
        np.int64
    )  # n sessions always suffice
    first, _ = draw_lengths(lengths, n, seed)
    outputs = _tokens(by_knots(stream(seed, "turn outputs").random(n), lengths.output_tokens))
    fresh = _tokens(by_knots(stream(seed, "new tokens").random(n), law.new_tokens))
    think = by_knots(stream(seed, "think times").random(n), law.think_s)

    shrinks, ratio, kept = np.zeros(n, bool), np.ones(n), np.ones(n)
    if law.shrinking is not None:
        shrinks = stream(seed, "shrinking").random(n) < law.shrinking.share
        ratio = by_knots(stream(seed, "shrunk to").random(n), law.shrinking.ratio)
        kept = by_knots(stream(seed, "shrunk, shared").random(n), law.shrinking.shared)
    columns: list[tuple[int, int, int, int, int, float]] = []  # session, turn, input, parent, shared, think
    session = 0
    while len(columns) < n:
        prompt = int(first[session])
        parent, shared = -1, 0
        for turn in range(int(turns[session])):
            row = len(columns)
            if row == n:
                break
            if turn:
                context = prompt + int(outputs[parent])
                prompt, shared = context + int(fresh[row]), context
                if shrinks[row]:
                    prompt = max(round(context * float(ratio[row])), 1)
                    shared = min(round(prompt * float(kept[row])), context)
                if prompt + int(outputs[row]) > law.max_context_tokens:
                    break
            columns.append(
                (session, turn, prompt, parent, shared, float("nan") if parent < 0 else float(think[row]))
            )
            parent = row
        session += 1
    number, turn_of, inputs, parents, prefix = (
        np.array([row[k] for row in columns], np.int64) for k in range(5)
    )
    starts = draw_arrivals(description.arrivals, session, seed)
    return synthetic_trace(
        description.name,
        np.where(parents < 0, starts[number], np.nan),
        inputs,
        outputs,
        session=number,
        turn=turn_of,
        parent=parents,
        think_s=np.array([row[5] for row in columns]),
        shared_prefix_tokens=prefix,
    )
