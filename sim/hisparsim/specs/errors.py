"""Errors of the specs: one clear line each, saying what, the value, the rule and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScenarioError(ValueError):
    """A scenario that cannot be simulated as written."""


class UnknownNameError(ScenarioError):
    """A preset, key or format that does not exist; the message names the nearest known one."""


class WeightsDoNotFitError(ScenarioError):
    """The model's weights leave no room for any KV on this node."""


class PoolTooSmallError(ScenarioError):
    """A GPU or host pool that cannot hold what it has to."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Query: the known name closest to `name` in spelling, or None where none resembles it.

    A name given without its section (`max_num_seqs`) finds the key that ends with it.
    """
    names = sorted(known)
    by_tail = [full for full in names if full.rsplit(".", 1)[-1] == name]
    if by_tail:
        return by_tail[0]
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if close:
        return close[0]
    tails = {full.rsplit(".", 1)[-1]: full for full in names}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], sorted(tails), n=1, cutoff=cutoff)
    return tails[close[0]] if close else None


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Query: the error for an unknown `name` of a `kind`, with the nearest and all known names."""
    names = sorted(known)
    hint = nearest(name, names)
    did_you_mean = f" (did you mean {hint!r}?)" if hint else ""
    return UnknownNameError(f"unknown {kind} {name!r}{did_you_mean}; known: {', '.join(names)}")
