"""The grid: every combination of the axes that its conditions allow, once each, in the order of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

from .axes import Axis, Value, scenario_key
from .errors import SweepError


@dataclass(frozen=True)
class Condition:
    """A key that is set only where other keys have certain values: ``[[when]]``."""

    key: str
    only_if: Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep: the values of its axes (absent where a condition does not hold)."""

    trace: str
    seed: int | None
    """None: the base scenario's."""
    values: Mapping[str, Value]


def parse_condition(written: Any) -> Condition:
    """Query: the condition of one ``[[when]]`` table: ``key``, and ``if`` with key = list of values.

    Raises:
        SweepError: a key is missing or unknown.
    """
    if not isinstance(written, Mapping) or set(written) != {"key", "if"}:
        raise SweepError('[[when]] needs `key`, and `if` as in {"policy.name" = ["hybrid"]}')
    only_if = written["if"]
    if not isinstance(only_if, Mapping) or not only_if:
        raise SweepError(f"[[when]] of {written['key']}: if = {only_if!r} names no key and its values")
    pairs = {
        scenario_key(str(name)): tuple(values) if isinstance(values, list) else (values,)
        for name, values in only_if.items()
    }
    return Condition(scenario_key(str(written["key"])), MappingProxyType(pairs))


class Rules:
    """The conditions of a sweep by the key that they are on."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._by_key: dict[str, list[Condition]] = {}
        for condition in conditions:
            self._by_key.setdefault(condition.key, []).append(condition)

    @property
    def keys(self) -> tuple[str, ...]:
        """Query: keys that are set under conditions only."""
        return tuple(self._by_key)

    def needs(self, key: str) -> set[str]:
        """Query: the keys that decide whether a key is set."""
        return {other for condition in self._by_key.get(key, ()) for other in condition.only_if}

    def active(self, key: str, full: Mapping[str, Value]) -> bool:
        """Query: whether a key is set, given a value of every key; those it depends on must be set too."""
        return all(
            full.get(other) in allowed and self.active(other, full)
            for condition in self._by_key.get(key, ())
            for other, allowed in condition.only_if.items()
        )


def check_conditions(
    axes: Sequence[Axis], fixed: Mapping[str, Value], conditions: Sequence[Condition]
) -> None:
    """Query: nothing, if the conditions can be met.

    Raises:
        SweepError: a condition on a key that does not vary, on itself, or that never holds.
    """
    taken = {key: {row[i] for row in axis.values} for axis in axes for i, key in enumerate(axis.keys)}
    for condition in conditions:
        if condition.key not in taken:
            raise SweepError(f"[[when]] of {condition.key}: it is no axis; known: {', '.join(taken)}")
        for key, allowed in condition.only_if.items():
            possible = taken.get(key, {fixed[key]} if key in fixed else set())
            if not possible:
                raise SweepError(f"[[when]] of {condition.key}: {key} is neither an axis nor in [set]")
            if not possible & set(allowed):
                raise SweepError(
                    f"contradictory condition: {condition.key} only if {key} is {_any_of(allowed)}, "
                    f"but {key} is {_any_of(sorted(possible, key=str))}"
                )
    needs = {condition.key: set(condition.only_if) for condition in conditions}
    for condition in conditions:
        needs[condition.key] |= set(condition.only_if)
    for key in needs:
        reached, frontier = set[str](), {key}
        while frontier:
            frontier = {need for one in frontier for need in needs.get(one, ())} - reached
            reached |= frontier
        if key in reached:
            raise SweepError(f"contradictory conditions: {key} is set only where {key} is set already")


def expand(
    traces: Sequence[str],
    axes: Sequence[Axis],
    seeds: Sequence[int | None],
    fixed: Mapping[str, Value],
    conditions: Sequence[Condition],
) -> tuple[Point, ...]:
    """Query: the points, the first axis slowest, seeds fastest; equal combinations once.

    Raises:
        SweepError: the conditions contradict each other.
    """
    check_conditions(axes, fixed, conditions)
    rules = Rules(conditions)
    combinations: dict[tuple[tuple[str, Value], ...], None] = {}
    for rows in product(*(axis.values for axis in axes)):
        varied = {
            key: value
            for axis, row in zip(axes, rows, strict=True)
            for key, value in zip(axis.keys, row, strict=True)
        }
        full = {**fixed, **varied}
        combinations[tuple((key, value) for key, value in varied.items() if rules.active(key, full))] = None
    for key in rules.keys:
        if not any(name == key for combination in combinations for name, _ in combination):
            raise SweepError(f"contradictory conditions: no combination of the axes ever sets {key}")
    return tuple(
        Point(trace, seed, MappingProxyType(dict(combination)))
        for trace in traces
        for combination in combinations
        for seed in seeds
    )


def _any_of(values: Sequence[Value]) -> str:
    return " or ".join(str(value) for value in values)
