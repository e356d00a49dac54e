"""``hisparsim doctor``: what this machine is, what its links give, whether the kernels compute right here.

It ends with what a validation on it would use and how long that takes, from a rough calibration and the
simulation of every workload.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hisparsim.cost.calibration_file import write_calibration
from hisparsim.des.simulate import simulate
from hisparsim.results.metrics import compute_metrics
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind
from hisparsim_kernels.references.rows import pack
from hisparsim_kernels.row_format import RowFormat
from hisparsim_traces import closed_loop

from .calibration import calibrate
from .calibration_source import NUM_PASSES
from .devices import Device, open_device
from .doctor_links import GpuPlace, LinkReport, gpu_places, measure_gpu_links, measure_host_links
from .engine import run_real
from .geometry import sliced_scenario
from .machine import describe_machine, versions
from .options import RunOptions
from .validation import NUM_RERUNS, capacity_per_s, with_calibration
from .validation_workloads import POLICIES, SCALES, base_scenario, workloads

ROUGH_SCALE = 0.1
"""Size of the calibration that the estimate of a validation rests on."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SelfTest:
    """One check of what this machine computes."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class ValidationPlan:
    """What ``hisparsim validate`` would do here."""

    model: str
    num_layers: int
    num_experts: int
    gpu_pool_bytes: int
    host_pool_bytes: int
    num_cells: int
    estimate_s: float | None
    """Seconds; None where it was not asked for."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the doctor found."""

    machine: dict[str, Any]
    versions: dict[str, str]
    driver: str | None
    places: tuple[GpuPlace, ...]
    links: tuple[LinkReport, ...]
    limits: dict[str, Any]
    tests: tuple[SelfTest, ...]
    plan: ValidationPlan
    findings: tuple[str, ...]
    """Sentences: what an operator should mend before a validation."""

    @property
    def is_healthy(self) -> bool:
        """Every self-test passed."""
        return all(test.passed for test in self.tests)

    def as_json(self) -> dict[str, Any]:
        """Query: the diagnosis as plain data."""
        return asdict(self) | {"is_healthy": self.is_healthy}


def examine(
    device_name: str,
    *,
    threads: int | None = None,
    with_estimate: bool = True,
    progress: Progress | None = None,
) -> Diagnosis:
    """Change: look at the machine and measure it; takes a minute or two.

    Args:
        with_estimate: also say how long a validation takes (a rough calibration of some seconds).

    Raises:
        RealRunError: no such device here.
    """
    say = progress or (lambda line: None)
    device = open_device(device_name, threads=threads)
    say("links")
    places = gpu_places() if device.is_cuda else ()
    links = measure_gpu_links(places) if device.is_cuda else measure_host_links()
    say("self-tests")
    tests = self_tests(device, threads)
    with tempfile.TemporaryDirectory(prefix="hisparsim-doctor-") as name:
        base = base_scenario(device_name, Path(name))
        estimate = None
        if with_estimate:
            say("a rough calibration, for the estimate")
            estimate = estimate_s(base, RunOptions(device=device_name, threads=threads), Path(name))
        plan = plan_of(base, device_name, estimate)
    limits = memory_limits()
    return Diagnosis(
        machine=describe_machine(device),
        versions=versions(),
        driver=_driver() if device.is_cuda else None,
        places=places,
        links=links,
        limits=limits,
        tests=tests,
        plan=plan,
        findings=tuple(findings(device, limits, plan, describe_machine(device))),
    )


def self_tests(device: Device, threads: int | None = None) -> tuple[SelfTest, ...]:
    """Query: rows, a run under two policies; on a GPU also its residency kernels against their references."""
    tests = [_rows_are_packed(device), _policies_agree("cuda" if device.is_cuda else "cpu", threads)]
    if device.is_cuda:
        from hisparsim_kernels.residency_check import check_residency

        passed, detail = check_residency(device.torch_device)
        tests.append(SelfTest("residency kernels against their references", passed, detail))
    return tuple(tests)


def _rows_are_packed(device: Device) -> SelfTest:
    """Rows of random values are packed on the device into the bytes that the format has."""
    generator = torch.Generator().manual_seed(7)
    latent = torch.randn(64, 512, generator=generator).to(device.torch_device)
    rope = torch.randn(64, 64, generator=generator).to(device.torch_device)
    packed = pack(latent, rope, RowFormat.FP8_DS_MLA)
    shape = tuple(packed.contiguous().view(torch.uint8).view(len(latent), -1).shape)
    passed = shape[1] == RowFormat.FP8_DS_MLA.row_bytes
    return SelfTest("rows of fp8_ds_mla are packed", passed, f"{shape[1]} bytes a row")


def _policies_agree(device_name: str, threads: int | None) -> SelfTest:
    """Four requests served from GPU pages and from hot buffers give the same tokens."""
    with tempfile.TemporaryDirectory(prefix="hisparsim-doctor-") as name:
        base = sliced_scenario(Scenario.load(None, SCALES["cpu"].settings), 2, 2, Path(name))
        trace = closed_loop(4, (150, 200), (4, 8), seed=21)
        options = RunOptions(device=device_name, threads=threads, batch_invariant=True)
        answers = [
            run_real(
                base.with_overrides([f"policy.name={policy}", "workload.concurrency=2"]), trace, options
            ).answers
            for policy in ("gpu-only", "host-resident")
        ]
    tokens = sum(len(answer) for answer in answers[0].values())
    detail = f"{tokens} tokens of gpu-only and host-resident compared"
    return SelfTest("the answer does not depend on residency", answers[0] == answers[1], detail)


def plan_of(base: Scenario, device_name: str, estimate: float | None) -> ValidationPlan:
    """Query: what a validation would use."""
    setup, model = base.setup(PoolKind.PACKED), base.model_spec
    return ValidationPlan(
        model=model.name,
        num_layers=model.num_layers,
        num_experts=model.num_routed_experts,
        gpu_pool_bytes=setup.gpu_pool_bytes,
        host_pool_bytes=setup.num_host_blocks * setup.host_block_stride_bytes,
        num_cells=len(POLICIES) * len(workloads(device_name)),
        estimate_s=estimate,
    )


def estimate_s(base: Scenario, options: RunOptions, folder: Path) -> float:
    """Change: seconds of ``hisparsim validate``: a rough calibration, then all its runs simulated."""
    file = folder / "rough.json"
    run = calibrate(base, options, scale=ROUGH_SCALE)
    write_calibration(run.calibration, file)
    calibrating = NUM_PASSES * float(run.samples.duration_ns.sum()) / 1e9 / ROUGH_SCALE
    priced = with_calibration(base, file)
    total, last = calibrating, 0.0
    for workload in workloads(options.device):
        trace = workload.make(capacity_per_s(priced, workload), 0)
        for policy in POLICIES:
            chosen = priced.with_overrides([f"policy.name={policy}", *workload.settings])
            last = compute_metrics(simulate(chosen, trace)).duration_s * workload.num_rounds
            total += last
    return total + (NUM_RERUNS - 1) * last


def memory_limits() -> dict[str, Any]:
    """Query: what may be locked and what is free. ``None`` stands for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infinite = resource.RLIM_INFINITY
    return {
        "locked_memory_bytes": None if soft == infinite else soft,
        "locked_memory_hard_bytes": None if hard == infinite else hard,
        "shared_memory_bytes": _free_bytes(Path("/dev/shm")),
    }


def _free_bytes(path: Path) -> int | None:
    return shutil.disk_usage(path).free if path.is_dir() else None


def findings(
    device: Device, limits: dict[str, Any], plan: ValidationPlan, machine: dict[str, Any]
) -> list[str]:
    """Query: what to mend, one sentence each, empty where all is well."""
    found = []
    load, cores = float(machine["load_1min"]), int(machine["num_cores"])
    if load > 0.5 * cores:
        found.append(f"the load is {load:.1f} on {cores} cores: a validation would be too noisy to tell")
    locked = limits["locked_memory_bytes"]
    if device.is_cuda and locked is not None and locked < plan.host_pool_bytes:
        found.append(
            f"locked memory is limited to {locked / 2**30:.2f} GiB, the host pool takes "
            f"{plan.host_pool_bytes / 2**30:.1f}: raise it (ulimit -l unlimited)"
        )
    shared = limits["shared_memory_bytes"]
    if device.is_cuda and shared is not None and shared < plan.host_pool_bytes:
        found.append(
            f"/dev/shm has {shared / 2**30:.1f} GiB free; ranks share a host pool of "
            f"{plan.host_pool_bytes / 2**30:.1f} there"
        )
    free = int(machine["free_memory_bytes"])
    needed = plan.host_pool_bytes + (0 if device.is_cuda else plan.gpu_pool_bytes)
    if free < 2 * needed:
        found.append(f"{free / 2**30:.1f} GiB of memory are free, the pools take {needed / 2**30:.1f}")
    return found


def _driver() -> str | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.splitlines()[0].strip() if told.strip() else None
