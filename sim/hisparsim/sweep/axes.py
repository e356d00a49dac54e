"""Axes: which scenario keys vary, and over which values.

An axis is one or several keys that move together (*zipped*); a value of an axis is one value for each of its
keys. Written as a list, a range ``{start, stop, num}`` or a log range ``{start, stop, num, log = true}``.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hisparsim.specs.errors import nearest_key
from hisparsim.specs.scenario import known_keys

from .errors import SweepError

Value: TypeAlias = bool | int | float | str | None
"""A value of a scenario key as TOML holds it; None = the key's default by the engine's rule."""

POLICY_KEY = "policy.name"
_ALIASES = {"policy": POLICY_KEY}
_RANGE_KEYS = ("start", "stop", "num", "log")
_RANGE_TEXT = re.compile(r"(?P<start>[-+.\deE]+):(?P<stop>[-+.\deE]+):(?P<num>\d+)(?P<log>:log)?")


@dataclass(frozen=True)
class Axis:
    """Keys that move together, and the values they take, in the order written."""

    keys: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        name = " and ".join(self.keys)
        if not self.values:
            raise SweepError(f"axis {name} is empty: give at least one value")
        for row in self.values:
            if len(row) != len(self.keys):
                raise SweepError(
                    f"zip of {name}: the value {list(row)} has {len(row)} entries, one for each of the "
                    f"{len(self.keys)} keys is needed"
                )
        if len(set(self.values)) != len(self.values):
            twice = next(row for i, row in enumerate(self.values) if row in self.values[:i])
            raise SweepError(f"axis {name}: {', '.join(map(str, twice))} is given twice")


def scenario_key(name: str) -> str:
    """Query: the dotted scenario key behind a name (``policy`` stands for ``policy.name``).

    Raises:
        SweepError: no such key; the nearest is named.
    """
    key = _ALIASES.get(name, name)
    known = known_keys()
    if key in known or (key.startswith("policy.") and key.count(".") == 1 and key != "policy."):
        return key
    close = nearest_key(key, known)
    hint = f" (did you mean {close!r}?)" if close else f"; known: {', '.join(known)}"
    raise SweepError(f"unknown scenario key {name!r}{hint}")


def parse_axis(name: str, written: Any) -> Axis:
    """Query: the axis of one key from what a sweep file says of it.

    Raises:
        SweepError: unknown key, no values, or a range that is none.
    """
    key = scenario_key(name)
    if isinstance(written, Mapping):
        return Axis((key,), tuple((value,) for value in _range(name, written)))
    if not isinstance(written, list):
        raise SweepError(f"axis {name} = {written!r}: give a list, or a range {{start, stop, num, log}}")
    return Axis((key,), tuple((_scalar(name, value),) for value in written))


def parse_axis_text(text: str) -> Axis:
    """Query: the axis of ``key=v1,v2,...``, ``key=start:stop:num`` or ``key=start:stop:num:log``.

    Raises:
        SweepError: as :func:`parse_axis`.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name.strip():
        raise SweepError(f"--axis {text!r}: expected key=value,value,... or key=start:stop:num[:log]")
    name = name.strip()
    found = _RANGE_TEXT.fullmatch(rest.strip())
    if found:
        given = {key: parse_scalar(found[key]) for key in ("start", "stop", "num")}
        return parse_axis(name, {**given, "log": bool(found["log"])})
    parts = [part.strip() for part in rest.split(",")]
    return parse_axis(name, [parse_scalar(part) for part in parts if part])


def parse_zip(written: Any) -> Axis:
    """Query: the axis of one ``[[zip]]`` table: ``keys`` and ``values``, one list a combination.

    Raises:
        SweepError: a key is missing or unknown, or a combination has another length.
    """
    if not isinstance(written, Mapping) or set(written) != {"keys", "values"}:
        raise SweepError("[[zip]] needs `keys` (a list of scenario keys) and `values` (a list of lists)")
    names, rows = written["keys"], written["values"]
    if not isinstance(names, list) or len(names) < 2 or not isinstance(rows, list):
        raise SweepError(f"[[zip]] keys = {names!r}: give at least two keys, and `values` as a list of lists")
    for row in rows:
        if not isinstance(row, list):
            raise SweepError(f"[[zip]] of {', '.join(names)}: {row!r} is not a list of one value a key")
    keys = tuple(scenario_key(name) for name in names)
    return Axis(keys, tuple(tuple(_scalar(names[0], value) for value in row) for row in rows))


def parse_scalar(text: str) -> Value:
    """Query: a value as TOML reads it, ``null`` as None, anything else as text."""
    if text.lower() in ("null", "none"):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def override(key: str, value: Value) -> str:
    """Query: ``key=text`` as :meth:`hisparsim.Scenario.with_overrides` reads it."""
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    return f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}"


def _scalar(name: str, value: Any) -> Value:
    if isinstance(value, str) and value.lower() in ("null", "none"):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SweepError(f"axis {name}: {value!r} is not a single value; `[[zip]]` moves several keys together")


def _range(name: str, written: Mapping[str, Any]) -> Sequence[float | int]:
    unknown = set(written) - set(_RANGE_KEYS)
    missing = [key for key in ("start", "stop", "num") if key not in written]
    if unknown or missing:
        what = f"unknown {sorted(unknown)[0]!r}" if unknown else f"{missing[0]!r} is missing"
        raise SweepError(f"axis {name}: a range is {{start, stop, num, log}}, {what}")
    start, stop, num, log = written["start"], written["stop"], written["num"], written.get("log", False)
    numbers = all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in (start, stop)
    )
    if not numbers or not isinstance(num, int) or isinstance(num, bool) or not isinstance(log, bool):
        raise SweepError(
            f"axis {name}: start and stop are finite numbers, num a whole number, log true or false"
        )
    if num < 1:
        raise SweepError(f"axis {name} is empty: num = {num}, give at least 1")
    if log and (start <= 0 or stop <= 0):
        raise SweepError(f"axis {name}: a log range from {start} to {stop} needs both ends above 0")
    whole = isinstance(start, int) and isinstance(stop, int)
    shares = [i / (num - 1) if num > 1 else 0.0 for i in range(num)]
    if log:
        points = [math.exp(math.log(start) + share * math.log(stop / start)) for share in shares]
    else:
        points = [start + share * (stop - start) for share in shares]
    points[0] = start
    if num > 1:
        points[-1] = stop
    if not whole:
        return [float(f"{point:.12g}") for point in points]
    return list(dict.fromkeys(round(point) for point in points))
