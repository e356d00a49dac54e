"""What was measured on a real server, whatever tool wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ReportError


@dataclass(frozen=True, slots=True)
class Measurement:
    """Metrics of a real server by dotted name, in this project's units."""

    name: str
    source: str
    """The tool that wrote the file."""
    metrics: Mapping[str, float]
    definitions: tuple[str, ...]
    """Sentences: which definition each metric was matched to, and what could not be."""


def number(values: Mapping[str, Any], key: str, path: Path) -> float:
    """Query: a finite number of a file, not below 0. Raises ReportError where it is none."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ReportError(f"{path}: {key} = {value!r}; a finite number is needed")
    if value < 0:
        raise ReportError(f"{path}: {key} = {value!r}; no measured time, rate or count is below 0")
    return float(value)
