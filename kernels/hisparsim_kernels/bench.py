# mypy: disable-error-code="no-untyped-call"
"""Measure kernels: time, GB/s, TFLOP/s and share of the roof, as tidy rows.

On a GPU every launch sits in a CUDA graph. `time_us` is the median over replays of a graph of `LAUNCHES`
launches in a row (inputs that fit the L2 cache are read from there); `cold_us` is one launch after a 256 MiB
write has displaced the cache. On a CPU the references of the cases marked tiny are timed: the kernels there
run in an interpreter, whose times say nothing.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import torch

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.errors import BenchFileError, DeviceError
from hisparsim_kernels.registry import BenchCase
from hisparsim_kernels.roofs import peaks_of, share_of_roof

LAUNCHES = 16
REPLAYS = 15
COLD_RUNS = 7
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class BenchRow:
    """One measurement. `implementation` is triton, torch or reference; rates are None where nothing is
    counted.
    """

    kernel: str
    case: str
    implementation: str
    device: str
    arch: str
    time_us: float
    cold_us: float | None
    gb_per_s: float
    tflop_per_s: float | None
    roof: str
    share_of_roof: float | None


@dataclass(frozen=True)
class Timing:
    """Median seconds of one launch: back to back, and with a displaced cache (None on a CPU)."""

    time_s: float
    cold_s: float | None


def time_on_cpu(call: Callable[[], object]) -> Timing:
    """Median of three wall-clock runs after one to warm up."""
    call()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return Timing(statistics.median(seconds), None)


def capture(call: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph:
    """A graph of `launches` calls, captured after warm-up on a side stream (so that nothing compiles in
    capture).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph


def _elapsed_s(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def time_on_gpu(call: Callable[[], object]) -> Timing:
    """Median launch times of a captured call; see the module."""
    many = capture(call, LAUNCHES)
    many.replay()
    warm = statistics.median(_elapsed_s(many) for _ in range(REPLAYS)) / LAUNCHES
    single, flush = capture(call, 1), torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    cold = []
    for _ in range(COLD_RUNS):
        flush.zero_()
        cold.append(_elapsed_s(single))
    return Timing(warm, statistics.median(cold))


def measure(case: BenchCase, device: torch.device) -> list[BenchRow]:
    """Measure one case: the kernel and torch's operation on a GPU, the reference on a CPU."""
    prepared = case.prepare(device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    calls = (
        {"triton": prepared.run, "torch": prepared.torch_op} if on_gpu else {"reference": prepared.reference}
    )
    rows = []
    for implementation, call in calls.items():
        if call is None:
            continue
        timing = time_on_gpu(call) if on_gpu else time_on_cpu(call)
        share = share_of_roof(case.roof, peaks_of(name), prepared.moved_bytes, prepared.flops, timing.time_s)
        rows.append(
            BenchRow(
                kernel=case.kernel,
                case=case.case,
                implementation=implementation,
                device=name,
                arch=arch_of(device) if on_gpu else "cpu",
                time_us=round(timing.time_s * 1e6, 3),
                cold_us=None if timing.cold_s is None else round(timing.cold_s * 1e6, 3),
                gb_per_s=round(prepared.moved_bytes / timing.time_s / 1e9, 3),
                tflop_per_s=round(prepared.flops / timing.time_s / 1e12, 4) if prepared.flops else None,
                roof=case.roof.value,
                share_of_roof=None if share is None else round(share, 4),
            )
        )
    return rows


def run(cases: Iterable[BenchCase], device_name: str, progress: TextIO | None = None) -> list[BenchRow]:
    """Measure `cases` on `cuda` or `cpu` (tiny ones only). Raises `DeviceError` where CUDA is asked for and
    absent.
    """
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device is {device_name}, and torch {torch.__version__} finds no CUDA device; use --device cpu"
        )
    rows = []
    for case in cases:
        if device.type == "cpu" and not case.tiny:
            continue
        if progress is not None:
            print(f"{case.kernel}: {case.case}", file=progress)
        rows += measure(case, device)
    return rows


def write_csv(rows: Iterable[BenchRow], path: Path) -> None:
    """Write rows with a header; None becomes an empty field."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(BenchRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_csv(path: Path) -> list[BenchRow]:
    """Read what `write_csv` wrote. Raises `BenchFileError` for a file that it did not write."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            absent = [field.name for field in fields(BenchRow) if field.name not in (reader.fieldnames or ())]
            if absent:
                raise BenchFileError(
                    f"{path} has no column {', '.join(absent)}; it must be a file that `bench --out` wrote"
                )
            return [_row(path, reader.line_num, entry) for entry in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BenchFileError(
            f"{path} is no CSV file: {error}; it must be one that `bench --out` wrote"
        ) from None


def _row(path: Path, line: int, entry: dict[str, str]) -> BenchRow:
    """A row of the file; empty fields are None. Raises `BenchFileError` for what is no number."""
    try:
        return BenchRow(
            **{name: entry[name] for name in ("kernel", "case", "implementation", "device", "arch", "roof")},
            time_us=float(entry["time_us"]),
            gb_per_s=float(entry["gb_per_s"]),
            cold_us=float(entry["cold_us"]) if entry["cold_us"] else None,
            tflop_per_s=float(entry["tflop_per_s"]) if entry["tflop_per_s"] else None,
            share_of_roof=float(entry["share_of_roof"]) if entry["share_of_roof"] else None,
        )
    except (TypeError, ValueError) as error:
        raise BenchFileError(f"{path}:{line}: {error}; it must be a file that `bench --out` wrote") from None
