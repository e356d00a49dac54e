"""ServeGen client models: rates and length histograms by window, drawn into requests.

A client is `NAME-trace.csv` (no header: start_s, rate, CV, law, two parameters) beside `NAME-dataset.json`
({window: {"input_tokens": "{tokens: weight}", ...}}); either names it. Gaps are drawn with the window's rate
and CV by its law (Gamma, Weibull, or exponential where none is named); lengths independently from the
window's histograms, or from the latest window before that has any.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..csvbatches import csv_batches
from ..draws import gaps, stream
from ..errors import TraceError
from ..rows import Chunk, Format, Head, Options
from ..trace import Floats, Ints

_WINDOWS, _LENGTHS = "-trace.csv", "-dataset.json"
_NAMES = ["start_s", "rate_per_s", "cv", "law", "parameter_1", "parameter_2"]
_NOTE = "requests are drawn: rate and CV by window, lengths independent of each other"
_MAX_WINDOW_REQUESTS = 5_000_000


def read(path: Path, options: Options) -> Iterator[Chunk]:
    if path.name.endswith(_LENGTHS):
        path = path.with_name(path.name.removesuffix(_LENGTHS) + _WINDOWS)
    dataset = path.with_name(path.name.removesuffix(_WINDOWS) + _LENGTHS)
    if not (path.exists() and dataset.exists()):
        raise TraceError(f"is half a client: NAME{_WINDOWS} and NAME{_LENGTHS} lie side by side", path=path)
    if options.duration_s is not None and not 0 < options.duration_s < float("inf"):
        raise TraceError(f"duration {options.duration_s}: must be a finite number of seconds above 0")
    histograms = _histograms(dataset)
    windows = _windows(path)
    seed = options.seed or 0
    latest: tuple[_Histogram, _Histogram] | None = None
    drawn = 0
    for index, (start, rate, cv, law) in enumerate(windows):
        if options.duration_s is not None and start >= options.duration_s:
            return
        latest = histograms.get(round(start), latest)
        if rate <= 0:
            continue
        if latest is None:
            raise TraceError(f"has a rate at {start:g} s before any length histogram", path=path)
        length = (windows[index + 1][0] if index + 1 < len(windows) else start + _step(windows)) - start
        if options.duration_s is not None:
            length = min(length, options.duration_s - start)
        if rate * length > _MAX_WINDOW_REQUESTS:
            raise TraceError(f"asks for {rate * length:.3g} requests in the window at {start:g} s", path=path)
        rng = stream(seed, f"{path.name} {start:g}")
        times = start + _arrivals(rng, rate, cv, law, length)
        n = len(times)
        yield Chunk(
            line=np.arange(drawn + 1, drawn + n + 1),
            time_ns=np.rint(times * 1e9).astype(np.int64),
            input_tokens=latest[0].draw(rng, n),
            output_tokens=latest[1].draw(rng, n),
            notes=(_NOTE,),
        )
        drawn += n


class _Histogram:
    """Token counts by weight."""

    def __init__(self, weights: dict[int, float]) -> None:
        self.values = np.array(sorted(weights), np.int64)
        total = np.cumsum([weights[int(value)] for value in self.values])
        self.cumulative = total / total[-1]

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        place = np.searchsorted(self.cumulative, rng.random(n), side="right")
        return np.asarray(self.values[np.minimum(place, len(self.values) - 1)], np.int64)


def _arrivals(rng: np.random.Generator, rate: float, cv: float, law: str, length: float) -> Floats:
    """Times within a window of `length` seconds, of a process that has been running for hundreds of gaps."""
    process = law.lower() if law else "poisson"
    begin = (200 + 200 * rng.random()) / rate
    times = np.zeros(1)
    while times[-1] < begin + length:
        size = int(rate * length * 1.2) + 500
        more = gaps(rng, size, process, min(max(cv, 0.05), 90.0)) / rate
        times = np.concatenate([times, times[-1] + np.cumsum(more)])
    return np.asarray(times[(times >= begin) & (times < begin + length)] - begin)


def _step(windows: list[tuple[float, float, float, str]]) -> float:
    return windows[1][0] - windows[0][0] if len(windows) > 1 else 600.0


def _windows(path: Path) -> list[tuple[float, float, float, str]]:
    rows: list[tuple[float, float, float, str]] = []
    for batch in csv_batches(path, names=_NAMES):
        if batch.rejected:
            raise TraceError(f"{batch.rejected[0].reason} ({batch.rejected[0].detail})", path=path)
        for line, start, rate, cv, law in zip(
            batch.line.tolist(), *(batch.columns[name].to_pylist() for name in _NAMES[:4]), strict=True
        ):
            try:
                row = (float(start), float(rate), float(cv), law.strip())
            except ValueError:
                raise TraceError("unreadable number in a window", path=path, line=line) from None
            if not (np.isfinite(row[:3]).all() and row[1] >= 0 and row[2] >= 0 and row[0] < 1e9):
                raise TraceError("start, rate and CV are finite and not negative", path=path, line=line)
            if row[3] not in ("", "Gamma", "Weibull"):
                raise TraceError(f"unknown law {law!r}: Gamma, Weibull or none", path=path, line=line)
            if rows and row[0] <= rows[-1][0]:
                raise TraceError("windows start later and later", path=path, line=line)
            rows.append(row)
    return rows


def _histograms(path: Path) -> dict[int, tuple[_Histogram, _Histogram]]:
    try:
        content: Any = json.loads(path.read_bytes())
        out: dict[int, tuple[_Histogram, _Histogram]] = {}
        for window, columns in content.items():
            pair = [ast.literal_eval(columns[name] or "{}") for name in ("input_tokens", "output_tokens")]
            if all(pair):
                for weights in pair:
                    if any(type(v) is not int or not v >= 0 or not w >= 0 for v, w in weights.items()):
                        raise TraceError(
                            f"window {window}: weights of token counts, none negative", path=path
                        )
                    if not 0 < sum(weights.values()) < float("inf"):
                        raise TraceError(f"window {window}: weights add up to nothing", path=path)
                out[round(float(window))] = (_Histogram(pair[0]), _Histogram(pair[1]))
        return out
    except TraceError:
        raise
    except (
        OSError,
        ValueError,
        SyntaxError,
        KeyError,
        AttributeError,
        TypeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise TraceError(
            f"is no ServeGen dataset ({type(error).__name__}: {str(error)[:100]})", path=path
        ) from error


def recognise(head: Head) -> bool:
    if head.kind == "json":
        lengths = b'"input_tokens"' in head.raw and b'"output_tokens"' in head.raw
        beside = head.path.with_name(head.path.name.removesuffix(_LENGTHS) + _WINDOWS)
        return lengths and head.path.name.endswith(_LENGTHS) and beside.exists()
    if head.kind != "csv" or len(head.header) != 6 or head.header[3] not in ("", "Gamma", "Weibull"):
        return False
    try:
        [float(head.header[k]) for k in (0, 1, 2, 4, 5)]
    except ValueError:
        return False
    return True


FORMAT = Format(
    "servegen",
    "ServeGen client models",
    read,
    recognise,
    takes=frozenset({"seed", "duration_s"}),
    sessions_whole=True,
    pattern="*" + _WINDOWS,
)
