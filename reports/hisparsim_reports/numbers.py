"""Numbers as people read them: three digits that matter, with their unit."""

from __future__ import annotations

import math

GIB = 2**30
DASH = "–"
"""Stands for "no value": nothing finished, nothing looked up."""


def seconds(value: float | None) -> str:
    """Query: a duration given in seconds, in a unit that suits its size: ``42 ms``, ``1.2 h``."""
    if value is None:
        return DASH
    if value == 0:
        return "0 s"
    for limit, scale, unit in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (600.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
    ):
        if abs(value) < limit * (1 - 5e-4):
            return f"{three_digits(value * scale)} {unit}"
    return f"{three_digits(value / 3600)} h"


def byte_count(value: float | None) -> str:
    """Query: a number of bytes in decimal units: ``1.24 TB``."""
    if value is None:
        return DASH
    for limit, scale, unit in ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if abs(value) < limit:
            return f"{three_digits(value / scale)} {unit}"
    return f"{three_digits(value / 1e12)} TB"


def count(value: float | None) -> str:
    """Query: a count: exact with separators below a million, else ``48.1 M``."""
    if value is None:
        return DASH
    if abs(value) >= 1e9:
        return f"{three_digits(value / 1e9)} G"
    if abs(value) >= 1e6:
        return f"{three_digits(value / 1e6)} M"
    return f"{value:,.0f}"


def share(value: float | None) -> str:
    """Query: a share of one as a percentage."""
    if value is None:
        return DASH
    percent = 100 * value
    if 0 < percent < 0.005:
        return "< 0.01 %"
    return f"{percent:.2f} %" if 99 < percent < 100 or 0 < percent < 1 else f"{percent:.1f} %"


def ratio(value: float | None) -> str:
    """Query: a factor: ``2.31×``."""
    return DASH if value is None else f"{three_digits(value)}×"


def three_digits(value: float | None) -> str:
    """Query: a number with three digits that matter and separators, never in scientific notation."""
    if value is None:
        return DASH
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    leading = math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:,.{min(max(2 - leading, 0), 9)}f}"
