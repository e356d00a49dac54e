"""What machine this is: names, cores, memory, GPUs and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .devices import Device, host_memory_bytes

_PACKAGES = ("hisparsim", "torch", "triton", "numpy", "simpy")


def describe_machine(device: Device) -> dict[str, Any]:
    """Query: the machine, JSON-able; ``name`` says it in a few words."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "num_cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_memory_bytes": host_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": os.getloadavg()[0],
    }
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch_device)
        machine["gpu"] = properties.name
        machine["num_gpus"] = torch.cuda.device_count()
        machine["gpu_memory_bytes"] = properties.total_memory
        machine["name"] = f"{properties.name} x{machine['num_gpus']}"
    else:
        machine["name"] = f"{machine['processor']}, {machine['num_cores']} cores"
    return machine


def versions() -> dict[str, str]:
    """Query: versions of the packages that a measurement depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _processor() -> str:
    """Query: the processor's name as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
