# mypy: disable-error-code="no-untyped-call"
"""What only a GPU can show, as one list of checks that ends well within ten minutes.

Order: can a kernel read pinned host memory at all (as a tensor, and by address); values on the device against
the references; captured graphs replayed with changed inputs against eager runs; a memory checker over the
value checks, where `compute-sanitizer` is installed; bandwidth of the gather by row size and by programs;
attention times beside the published ones. On `cpu` the value and replay checks are rehearsed in the
interpreter, so that the script itself is tested where there is no GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

import torch

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.benchmarks.inputs import attention_inputs
from hisparsim_kernels.configs import find_config
from hisparsim_kernels.device_values import VALUE_CHECKS, Check, Outcome, decode
from hisparsim_kernels.errors import DeviceError
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.interpreter import activate, is_interpreting
from hisparsim_kernels.mla_decode import DecodeScratch
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.row_format import RowFormat

PUBLISHED_US = {"TileLang": 16.8, "FlashMLA": 22.8}
"""Sparse MLA decode with combine on an H200: 8 requests, 16 heads, top-k 2048, bf16 rows (a public engine's
report)."""
GATHER_ROW_BYTES = (128, 256, 656, 1152, 2048, 4096)
GATHER_PROGRAMS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check: True or False, or None where it only measures or was left out (see `detail`)."""

    name: str
    passed: bool | None
    detail: str
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)


def measure_gather(device: torch.device) -> Outcome:
    """GB/s of the host gather by row size with 32 programs, and by programs at 656-byte rows."""
    from hisparsim_kernels.bench import time_on_gpu

    figures = {}
    for row_bytes, programs in [(size, 32) for size in GATHER_ROW_BYTES] + [
        (656, n) for n in GATHER_PROGRAMS
    ]:
        layout = PageLayout.of_groups(row_bytes, (1,))
        blocks = max(64, (64 << 20) // layout.page_bytes)
        host = torch.empty(blocks, layout.host_block_bytes, dtype=torch.uint8, pin_memory=True)
        pool = torch.empty(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        misses = min(16384, blocks * 64)
        host_rows = torch.randperm(blocks * 64)[:misses].int().to(device)
        hot_rows = torch.randperm(blocks * 64)[:misses].int().to(device)
        count = torch.tensor([misses], dtype=torch.int32, device=device)
        gather = partial(
            gather_rows, host, pool, host_rows, hot_rows, count, layout, group=0, num_programs=programs
        )
        timing = time_on_gpu(gather)
        figures[f"{row_bytes} B, {programs} programs"] = round(misses * row_bytes / timing.time_s / 1e9, 2)
    return Outcome(None, "GB/s of random rows from pinned memory", figures)


def measure_attention(device: torch.device) -> Outcome:
    """Decode with merge beside the published times (8 requests, 16 heads), by splits and configuration.

    `h64` is the configuration for 64 heads, three quarters empty here: it uses the wider tensor core product.
    """
    from hisparsim_kernels.bench import time_on_gpu

    figures: dict[str, float] = {f"published {name} us": value for name, value in PUBLISHED_US.items()}
    for row_format in RowFormat:
        inputs = attention_inputs(device, row_format, 8, 16)
        for block in ("h16", "h64"):
            name = f"{row_format.value}-{block}"
            config = find_config("mla_decode", "mla_decode_split", name, arch_of(device))
            for splits in (8, 16, 32):
                scratch = DecodeScratch.create(8, 16, splits, device)
                timing = time_on_gpu(partial(decode, inputs, scratch, splits, config))
                label = f"{row_format.value} {block} {splits} splits"
                figures[f"{label} us"] = round(timing.time_s * 1e6, 2)
                if timing.cold_s is not None:
                    figures[f"{label} cold us"] = round(timing.cold_s * 1e6, 2)
    return Outcome(None, "microseconds of one step of attention", figures)


def check_memory(device: torch.device) -> Outcome:
    """`compute-sanitizer` memcheck over the value checks in a child process."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return Outcome(None, "left out: compute-sanitizer is not installed")
    child = [
        sys.executable,
        "-c",
        "from hisparsim_kernels.device_check import check_values_only; check_values_only()",
    ]
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *child]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=180, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, "left out: memcheck took more than 180 s")
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Outcome(done.returncode == 0, lines[-1][:200] if lines else f"exit status {done.returncode}")


GPU_CHECKS: tuple[tuple[str, Check], ...] = (
    ("gather bandwidth", measure_gather),
    ("attention times", measure_attention),
    ("memory checker", check_memory),
)


def check_values_only() -> None:
    """The value checks on a GPU that capture no graph, for a memory checker; raises where one fails."""
    for name, check in VALUE_CHECKS[:5]:
        outcome = check(torch.device("cuda"))
        if outcome.passed is False:
            raise AssertionError(f"{name}: {outcome.detail}")


def run_checks(device_name: str, budget_s: float, progress: TextIO | None = None) -> list[CheckResult]:
    """Run all checks on `cuda`, the value checks on `cpu`; a failing check does not stop the next.

    Checks that would start past `budget_s` are reported as left out. Raises `DeviceError` where `cuda` is
    asked for and absent, or where `cpu` is asked for outside the interpreter.
    """
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device is {device_name}, and torch {torch.__version__} finds no CUDA device")
    if device.type == "cpu":
        if not is_interpreting():
            raise DeviceError(
                "device is cpu, where kernels run in the interpreter only: set TRITON_INTERPRET=1"
            )
        activate()
    started = time.perf_counter()
    results = []
    for name, check in VALUE_CHECKS + (GPU_CHECKS if device.type == "cuda" else ()):
        begun = time.perf_counter()
        if begun - started > budget_s:
            outcome = Outcome(None, f"left out: the budget of {budget_s:.0f} s is spent")
        else:
            try:
                outcome = check(device)
            except Exception as error:
                outcome = Outcome(False, f"{type(error).__name__}: {error}")
        seconds = round(time.perf_counter() - begun, 2)
        results.append(CheckResult(name, outcome.passed, outcome.detail, seconds, outcome.figures))
        if progress is not None:
            print(f"{name}: {outcome.passed} ({outcome.detail}) {seconds:.1f} s", file=progress, flush=True)
    return results
