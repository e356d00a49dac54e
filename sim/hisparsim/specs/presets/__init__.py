"""Presets: models and nodes as TOML files, each figure beside its source.

A leaf is written `key = { value = 78, source = "where it was published" }`, or `key = "text"` for a name.
A file may start from another one of its kind with `base = "name"` and then gives only what differs;
`without = ["key"]` drops what it lacks.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hisparsim.specs.errors import ScenarioError, unknown_name

_HERE = Path(__file__).parent


class PresetKind(Enum):
    """What a preset describes; the value is the folder that holds its files."""

    MODEL = "models"
    NODE = "nodes"

    @property
    def noun(self) -> str:
        """The singular, for messages."""
        return self.value.removesuffix("s")


@dataclass(frozen=True)
class Preset:
    """A preset as read: nested values, and the source of each figure by its dotted key."""

    name: str
    values: dict[str, Any]
    sources: dict[str, str]


def preset_names(kind: PresetKind) -> tuple[str, ...]:
    """Query: the names of all bundled presets of a kind, sorted."""
    return tuple(sorted(path.stem for path in (_HERE / kind.value).glob("*.toml")))


def load_preset(kind: PresetKind, name: str) -> Preset:
    """Query: the preset called `name`, or read from a file where `name` ends in `.toml`.

    Raises UnknownNameError for an unknown name and ScenarioError for a file that is missing, not TOML, or
    based on itself.
    """
    return _load(kind, name, ())


def _load(kind: PresetKind, name: str, above: tuple[str, ...]) -> Preset:
    """Query: as `load_preset`; `above` are the presets that are based on this one."""
    if name in above:
        raise ScenarioError(
            f"{kind.noun} preset file {name!r} is based on itself: {' -> '.join([*above, name])}"
        )
    if name.endswith(".toml"):
        path = Path(name)
    elif name in preset_names(kind):
        path = _HERE / kind.value / f"{name}.toml"
    else:
        raise unknown_name(f"{kind.noun} preset", name, preset_names(kind))
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScenarioError(f"{kind.noun} preset file {name!r} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ScenarioError(f"{kind.noun} preset file {name!r} is not a TOML file: {error}") from None
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    base = table.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ScenarioError(
                f"{kind.noun} preset file {name!r}: base = {base!r}: give a preset's name or file"
            )
        parent = _load(kind, base, (*above, name))
        values, sources = parent.values, dict(parent.sources)
    without = table.pop("without", [])
    if not isinstance(without, list) or not all(isinstance(key, str) for key in without):
        raise ScenarioError(f"{kind.noun} preset file {name!r}: without = {without!r}: give a list of keys")
    for key in without:
        values.pop(key, None)
        sources.pop(key, None)
    _merge(table, values, sources, prefix="")
    values["name"] = path.stem
    return Preset(name=path.stem, values=values, sources=sources)


def _merge(table: dict[str, Any], values: dict[str, Any], sources: dict[str, str], prefix: str) -> None:
    """Change: lay a table over `values`, splitting each `{value, source}` leaf in two."""
    for key, entry in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(entry, dict) and "value" in entry:
            values[key] = entry["value"]
            sources[dotted] = str(entry.get("source", ""))
        elif isinstance(entry, dict):
            inner = values.get(key)
            values[key] = inner if isinstance(inner, dict) else {}
            _merge(entry, values[key], sources, prefix=f"{dotted}.")
        else:
            values[key] = entry
