"""The figures of the roofline source, read from a data file in which each stands beside its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_DATA = Path(__file__).parent / "data" / "roofline.toml"


class FiguresError(ValueError):
    """A figure that the data file does not have."""


@dataclass(frozen=True)
class Figures:
    """Figures by dotted key (`efficiency.hbm`), and their sources by the same key."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def number(self, key: str) -> float:
        """Query: one number."""
        return float(self._get(key))

    def whole(self, key: str) -> int:
        """Query: one whole number."""
        return int(self._get(key))

    def text(self, key: str) -> str:
        """Query: one name."""
        return str(self._get(key))

    def row(self, key: str) -> list[float]:
        """Query: a row of numbers."""
        return [float(entry) for entry in self._get(key)]

    def origin(self, key: str) -> str:
        """Query: the source of a figure, empty where the file gives none."""
        return self.origins.get(key, "")

    def with_values(self, **changes: float) -> Figures:
        """Query: the same figures with some replaced; `section__key=value` stands for `section.key`."""
        values = dict(self.values)
        for name, value in changes.items():
            key = name.replace("__", ".")
            self._get(key)
            values[key] = value
        return Figures(MappingProxyType(values), self.origins)

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise FiguresError(f"no figure {key!r}; known: {', '.join(sorted(self.values))}")
        return self.values[key]


@cache
def roofline_figures() -> Figures:
    """Query: the bundled figures."""
    table = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    _flatten(table, "", values, origins)
    return Figures(MappingProxyType(values), MappingProxyType(origins))


def _flatten(table: Mapping[str, Any], prefix: str, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Change: lay a nested table out by dotted keys, each `{value, source}` split in two."""
    for key, entry in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(entry, dict) and "source" in entry:
            values[dotted] = entry["value"]
            origins[dotted] = str(entry["source"])
        elif isinstance(entry, dict):
            _flatten(entry, f"{dotted}.", values, origins)
        else:
            values[dotted] = entry
