"""The simple shapes: Poisson arrivals, a closed loop, conversations of several turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..draws import stream
from ..errors import TraceError
from ..trace import Ints, Trace
from .assemble import synthetic_trace

Lengths = int | tuple[int, int] | Sequence[int] | NDArray[np.int64]
"""One length for all, an inclusive (low, high) range drawn uniformly, or one length a request."""


def poisson(
    num_requests: int,
    rate_per_s: float,
    input_tokens: Lengths,
    output_tokens: Lengths,
    seed: int,
    *,
    name: str = "poisson",
) -> Trace:
    """An open loop: independent requests whose gaps are exponential with mean 1 / rate."""
    n = _at_least_one("num_requests", num_requests)
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise TraceError(f"rate_per_s {rate_per_s}: must be a finite number above 0")
    gaps = -np.log1p(-stream(seed, "arrivals").random(n)) / rate_per_s
    return synthetic_trace(
        name,
        np.cumsum(gaps),
        _lengths("input_tokens", input_tokens, n, seed),
        _lengths("output_tokens", output_tokens, n, seed),
    )


def closed_loop(
    num_requests: int,
    input_tokens: Lengths,
    output_tokens: Lengths,
    *,
    seed: int = 0,
    name: str = "closed-loop",
) -> Trace:
    """Independent requests that all wait from time 0; whoever replays them limits how many run at once."""
    n = _at_least_one("num_requests", num_requests)
    return synthetic_trace(
        name,
        np.zeros(n),
        _lengths("input_tokens", input_tokens, n, seed),
        _lengths("output_tokens", output_tokens, n, seed),
    )


def conversations(
    num_sessions: int,
    turns: int,
    first_tokens: Lengths,
    later_tokens: Lengths,
    output_tokens: Lengths,
    *,
    think_s: float = 0.0,
    later_includes_output: bool = False,
    seed: int = 0,
    name: str = "conversations",
) -> Trace:
    """Sessions of `turns` turns, all first turns at time 0, each later one `think_s` after its parent's
    end.

    Turn k's prompt is the parent's prompt, the parent's output and new tokens, so the parent's whole
    context is its prefix. Rows are in order of session, then turn.

    Args:
        first_tokens: prompt of a first turn; a sequence has one length a session.
        later_tokens: what a later turn adds; a sequence has one length a later turn, by session, then turn.
        output_tokens: a sequence has one length a request, by session, then turn.
        later_includes_output: `later_tokens` counts the previous output too (the prompt grows by exactly
            `later_tokens`), instead of coming on top of it.

    Raises:
        TraceError: a size below 1, or later tokens that do not cover the output they include.
    """
    sessions = _at_least_one("num_sessions", num_sessions)
    turns = _at_least_one("turns", turns)
    if not (think_s >= 0 and np.isfinite(think_s)):
        raise TraceError(f"think_s {think_s}: must be a finite number of seconds, 0 or more")
    n = sessions * turns
    outputs = _lengths("output_tokens", output_tokens, n, seed).reshape(sessions, turns)
    growth = np.zeros((sessions, turns), np.int64)
    growth[:, 0] = _lengths("first_tokens", first_tokens, sessions, seed)
    if turns > 1:
        later = _lengths("later_tokens", later_tokens, sessions * (turns - 1), seed).reshape(
            sessions, turns - 1
        )
        if later_includes_output:
            if (later < outputs[:, :-1]).any():
                raise TraceError(
                    f"later_tokens {later.min()}: includes the previous output, so it must be at least that "
                    f"long ({outputs[:, :-1].max()})"
                )
            growth[:, 1:] = later
        else:
            growth[:, 1:] = later + outputs[:, :-1]
    inputs = np.cumsum(growth, axis=1)
    shared = np.zeros((sessions, turns), np.int64)
    shared[:, 1:] = inputs[:, :-1] + outputs[:, :-1]
    turn = np.tile(np.arange(turns), sessions)
    first = turn == 0
    return synthetic_trace(
        name,
        np.where(first, 0.0, np.nan),
        inputs.reshape(n),
        outputs.reshape(n),
        session=np.repeat(np.arange(sessions), turns),
        turn=turn,
        parent=np.where(first, -1, np.arange(n) - 1),
        think_s=np.where(first, np.nan, think_s),
        shared_prefix_tokens=shared.reshape(n),
    )


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise TraceError(f"{name} {value}: must be at least 1")
    return int(value)


def _lengths(name: str, given: Lengths, n: int, seed: int) -> Ints:
    """[n] token counts, at least 1 each."""
    if isinstance(given, (int, np.integer)):
        out = np.full(n, int(given), np.int64)
    elif isinstance(given, tuple):
        if len(given) != 2 or not 1 <= given[0] <= given[1]:
            raise TraceError(f"{name} {given}: a range is (low, high) with 1 <= low <= high")
        low, high = given
        out = low + np.floor(stream(seed, name).random(n) * (high - low + 1)).astype(np.int64)
    else:
        out = np.asarray(given, np.int64)
        if out.shape != (n,):
            raise TraceError(
                f"{name}: {len(out)} lengths given, {n} needed; give one number for all, or (low, high)"
            )
    if (out < 1).any():
        raise TraceError(f"{name} {out.min()}: every length must be at least 1 token")
    return out
