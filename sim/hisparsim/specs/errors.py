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


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Query: the known name closest to `name` in spelling, or None where none resembles it."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return close[0] if close else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Query: as `nearest`, for dotted keys: a missing or wrong section does not matter."""
    by_end = {full.rsplit(".", 1)[-1]: full for full in sorted(known, reverse=True)}
    end = key.rsplit(".", 1)[-1]
    if end in by_end:
        return by_end[end]
    whole = nearest(key, by_end.values())
    if whole is not None:
        return whole
    close = nearest(end, by_end)
    return by_end[close] if close else None


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Query: the error for an unknown `name` of a `kind`, with the nearest and all known names."""
    names = sorted(known)
    hint = nearest(name, names)
    did_you_mean = f" (did you mean {hint!r}?)" if hint else ""
    return UnknownNameError(f"unknown {kind} {name!r}{did_you_mean}; known: {', '.join(names)}")
