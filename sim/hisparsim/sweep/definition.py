"""The sweep file: what varies, over which traces and seeds, and what counts as better.

trace = "conversation"          # a file, a bundled name, or a list of them
limit = 2000
seeds = [0, 1, 2]               # or a number: 3
scenario = "base.toml"

[set]
"scheduler.max_num_seqs" = 128

[axes]
policy = ["hybrid", "prefix-offload"]
"kv.hot_rows" = [2048, 4096, 8192]
"workload.time_scale" = {start = 0.5, stop = 2.0, num = 3, log = true}

[[zip]]
keys = ["kv.host_pool_gib", "kv.prefix_offload_gib"]
values = [[256, 256], [512, 512]]

[[when]]
key = "kv.hot_rows"
if = {"policy.name" = ["hybrid"]}

[objectives]
maximize = ["output_tokens_per_s"]
minimize = ["ttft_s.p99"]

[constraints]
"ttft_s.p99" = {max = 10}
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hisparsim.serving.policies import policy_class
from hisparsim.specs.errors import nearest

from .axes import POLICY_KEY, Axis, Value, override, parse_axis, parse_scalar, parse_zip, scenario_key
from .errors import SweepError
from .grid import Condition, Point, expand, parse_condition
from .ranking import Constraint, Objective, parse_constraints, parse_objectives

_TOP_KEYS = ("trace", "limit", "seeds", "scenario", "set", "axes", "zip", "when", "objectives", "constraints")


@dataclass(frozen=True)
class Definition:
    """A sweep as written, checked as far as it can be without the traces."""

    traces: tuple[str, ...] = ()
    limit: int | None = None
    seeds: tuple[int | None, ...] = (None,)
    """None: the seed of the scenario."""
    scenario: Path | None = None
    fixed: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    axes: tuple[Axis, ...] = ()
    conditions: tuple[Condition, ...] = ()
    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    @property
    def axis_keys(self) -> tuple[str, ...]:
        """The keys that vary, in the order written."""
        return tuple(key for axis in self.axes for key in axis.keys)

    def points(self) -> tuple[Point, ...]:
        """Query: every scenario of the sweep, in the order of the axes.

        Raises:
            SweepError: nothing varies and no trace is named, a key is set twice, or conditions contradict.
            PolicyError: a policy that does not exist.
        """
        if not self.traces:
            raise SweepError('no trace: give trace = "..." in the sweep file, or --trace')
        keys = list(self.axis_keys)
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise SweepError(f"{twice[0]} is an axis twice; name each key once")
        both = [key for key in keys if key in self.fixed]
        if both:
            raise SweepError(f"contradictory: {both[0]} is in [set] and an axis; keep one of them")
        if "seed" in keys:
            raise SweepError("seed is no axis: give `seeds = [..]`, or --seed")
        for axis in self.axes:
            for i, key in enumerate(axis.keys):
                if key == POLICY_KEY:
                    for row in axis.values:
                        policy_class(str(row[i]))
        if POLICY_KEY in self.fixed:
            policy_class(str(self.fixed[POLICY_KEY]))
        return expand(self.traces, self.axes, self.seeds, self.fixed, self.conditions)

    def with_options(
        self,
        *,
        traces: Sequence[str] = (),
        limit: int | None = None,
        seeds: Sequence[int] = (),
        sets: Sequence[str] = (),
        axes: Sequence[Axis] = (),
        constraints: Sequence[Constraint] = (),
    ) -> Definition:
        """Query: this sweep with what a command line gives; an axis takes the place of one of its key.

        Raises:
            SweepError: a setting that is no ``key=value``, or of an unknown key.
        """
        fixed = dict(self.fixed)
        for text in sets:
            name, equals, value = text.partition("=")
            if not equals:
                raise SweepError(f"--set {text!r}: expected section.key=value")
            fixed[scenario_key(name.strip())] = parse_scalar(value.strip())
        replaced = {key for axis in axes for key in axis.keys}
        kept = [axis for axis in self.axes if not replaced & set(axis.keys)]
        return replace(
            self,
            traces=tuple(traces) or self.traces,
            limit=self.limit if limit is None else limit,
            seeds=tuple(seeds) or self.seeds,
            fixed=MappingProxyType(fixed),
            axes=(*kept, *axes),
            constraints=(*self.constraints, *constraints),
        )

    def fixed_overrides(self) -> list[str]:
        """Query: ``[set]`` as overrides of a scenario."""
        return [override(key, value) for key, value in self.fixed.items()]


def read_definition(path: Path) -> Definition:
    """Query: the sweep of a file.

    Raises:
        SweepError: not a TOML file, an unknown key (the nearest is named), or a value of the wrong kind.
    """
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SweepError(f"sweep file {str(path)!r} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SweepError(f"sweep file {str(path)!r} is not a TOML file: {error}") from None
    return parse_definition(written, path.parent)


def parse_definition(written: Mapping[str, Any], directory: Path) -> Definition:
    """Query: the sweep of a file's values; paths in it are relative to ``directory``.

    Raises:
        SweepError: as :func:`read_definition`.
    """
    for key in written:
        if key not in _TOP_KEYS:
            close = nearest(key, _TOP_KEYS)
            hint = f" (did you mean {close!r}?)" if close else ""
            raise SweepError(f"unknown key {key!r} in the sweep file{hint}; known: {', '.join(_TOP_KEYS)}")
    limit = written.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise SweepError(f"limit = {limit!r}: give a number of requests, at least 1")
    scenario = written.get("scenario")
    if scenario is not None and not isinstance(scenario, str):
        raise SweepError(f"scenario = {scenario!r}: give the path of a scenario file; keys go into [set]")
    fixed = _table(written, "set")
    axes = [parse_axis(name, values) for name, values in _table(written, "axes").items()]
    axes += [parse_zip(table) for table in _tables(written, "zip")]
    return Definition(
        traces=_traces(written.get("trace"), directory),
        limit=limit,
        seeds=_seeds(written.get("seeds")),
        scenario=None if scenario is None else Path(_beside(scenario, directory)),
        fixed=MappingProxyType({scenario_key(name): _fixed(name, value) for name, value in fixed.items()}),
        axes=tuple(axes),
        conditions=tuple(parse_condition(table) for table in _tables(written, "when")),
        objectives=parse_objectives(written.get("objectives", {})),
        constraints=parse_constraints(written.get("constraints", {})),
    )


def _traces(written: Any, directory: Path) -> tuple[str, ...]:
    names = [written] if isinstance(written, str) else written
    if written is None:
        return ()
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise SweepError(f"trace = {written!r}: give a file, a bundled trace's name, or a list of them")
    if len(set(names)) != len(names):
        raise SweepError(f"trace = {written!r}: a trace is named twice")
    return tuple(_beside(name, directory) for name in names)


def _seeds(written: Any) -> tuple[int | None, ...]:
    if written is None:
        return (None,)
    seeds = list(range(written)) if isinstance(written, int) and not isinstance(written, bool) else written
    whole = isinstance(seeds, list) and all(
        isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds
    )
    if not whole or not seeds or len(set(seeds)) != len(seeds):
        raise SweepError(f"seeds = {written!r}: give different whole numbers, at least one, or how many")
    return tuple(seeds)


def _beside(name: str, directory: Path) -> str:
    """Query: a path relative to the sweep file where that exists, else the name as written."""
    beside = directory / name
    return str(beside) if beside.exists() else name


def _table(written: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = written.get(key, {})
    if not isinstance(table, Mapping):
        raise SweepError(f"{key} = {table!r}: [{key}] is a table of scenario keys")
    flat: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, Mapping) and not (key == "axes" and {"start", "stop", "num"} & set(value))
        if nested:  # an unquoted dotted key is a table of tables in TOML
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    return flat


def _tables(written: Mapping[str, Any], key: str) -> list[Any]:
    tables = written.get(key, [])
    if not isinstance(tables, list):
        raise SweepError(f"[{key}] is written [[{key}]]: it can stand several times")
    return tables


def _fixed(name: str, value: Any) -> Value:
    if isinstance(value, str) and value.lower() in ("null", "none"):
        return None
    if isinstance(value, bool | int | float | str):
        return value
    raise SweepError(f"[set] {name} = {value!r}: give a single value; several make an axis ([axes])")
