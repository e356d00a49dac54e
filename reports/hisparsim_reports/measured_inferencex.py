"""InferenceX-style CSV: one row a point of a concurrency sweep, latencies in seconds, rates a GPU."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from hisparsim.results.distribution import STATISTICS

from .errors import ReportError
from .measurement import Measurement, number

_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
_RATES = {"output_tput_per_gpu": "output_tokens_per_s", "tput_per_gpu": "total_tokens_per_s"}
_CONCURRENCY = ("conc", "concurrency", "max_concurrency")
_SCALES = {"": 1.0, "_s": 1.0, "_ms": 1e-3}
"""Endings of a latency's column; without one InferenceX gives seconds."""


def read_inferencex(path: Path, concurrency: int | None) -> Measurement:
    """Query: the row of a concurrency, or the only one.

    Raises:
        ReportError: no latencies in it, several rows and no concurrency, or none of that concurrency.
    """
    rows = _rows(path)
    column = next((name for name in _CONCURRENCY if name in rows[0]), None)
    if concurrency is not None and column is not None:
        chosen = [row for row in rows if _as_float(row[column]) == concurrency]
    else:
        chosen = rows
    if len(chosen) != 1:
        known = ", ".join(dict.fromkeys(row[column] for row in rows)) if column else "no column names it"
        raise ReportError(
            f"{path}: {len(chosen)} of {len(rows)} rows match; name one with --concurrency (known: {known})"
        )
    row = {name: value for name, text in chosen[0].items() if (value := _as_float(text)) is not None}
    metrics: dict[str, float] = {}
    for theirs, ours in _LATENCIES.items():
        for statistic in STATISTICS:
            prefix = "median" if statistic == "p50" else statistic
            for ending, scale in _SCALES.items():
                name = f"{prefix}_{theirs}{ending}"
                if name in row:
                    metrics[f"{ours}.{statistic}"] = number(row, name, path) * scale
    gpus = _num_gpus(row)
    for theirs, ours in _RATES.items():
        if theirs in row and gpus is not None:
            metrics[ours] = number(row, theirs, path) * gpus
    if not metrics:
        raise ReportError(
            f"{path}: no column such as median_ttft or mean_tpot; its columns: {', '.join(rows[0])}"
        )
    definitions = (
        "Latencies as the serving benchmark behind the table defines them (TTFT, TPOT, ITL, E2E as here), "
        "seen by the client.",
        f"Rates a GPU times {gpus:g} GPUs (columns tp, dp)."
        if gpus is not None
        else "Rates a GPU are left out: no column tells the number of GPUs.",
        f"Row of concurrency {chosen[0][column]}." if column else "The only row.",
    )
    return Measurement(path.stem, "InferenceX table", metrics, definitions)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{path}: cannot be read as CSV ({error})") from None
    if not rows:
        raise ReportError(f"{path}: has no rows")
    return [
        {name.strip().lower(): (text or "").strip() for name, text in row.items() if name} for row in rows
    ]


def _num_gpus(row: Mapping[str, float]) -> float | None:
    if "num_gpus" in row:
        return row["num_gpus"]
    return row["tp"] * row.get("dp", 1.0) if "tp" in row else None


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
