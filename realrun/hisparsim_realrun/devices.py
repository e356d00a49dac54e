"""Devices: where the pools lie and which kernels run.

``cpu`` keeps two memory tiers in RAM and runs torch and numpy routines (``--kernels torch``, the default) or
the Triton kernels in their interpreter (``--kernels triton``, tiny sizes only). ``cuda`` runs the Triton
kernels on one GPU a rank; that path has been read and type-checked, never yet measured on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

import torch

from .errors import RealRunError
from .heap import keep_memory


class KernelKind(Enum):
    TORCH = "torch"
    TRITON = "triton"


@dataclass(frozen=True)
class Device:
    """One rank's device, kernels and threads."""

    torch_device: torch.device
    kernels: KernelKind

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def synchronize(self) -> None:
        """Wait until everything enqueued has run."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def memory_bytes(self) -> int:
        """Query: bytes that are free on the device now."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        return host_memory_bytes()


def open_device(
    name: str, kernels: str | None = None, *, threads: int | None = None, local_rank: int = 0
) -> Device:
    """Change: the device called ``name`` (``cpu`` or ``cuda``); on a CPU sets torch's threads and the heap.

    Raises:
        RealRunError: an unknown name, kernels that the device lacks, or no such GPU.
    """
    if name not in ("cpu", "cuda"):
        raise RealRunError(f"device {name!r} is unknown: known are cpu and cuda")
    default = KernelKind.TORCH if name == "cpu" else KernelKind.TRITON
    try:
        kind = KernelKind(kernels) if kernels is not None else default
    except ValueError:
        raise RealRunError(f"kernels {kernels!r} are unknown: known are torch and triton") from None
    if name == "cuda":
        if kind is not KernelKind.TRITON:
            raise RealRunError("device cuda runs the Triton kernels only: drop --kernels torch")
        if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise RealRunError(
                f"device cuda, rank {local_rank}: this machine has {count} usable GPUs; use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        return Device(torch.device("cuda", local_rank), kind)
    keep_memory()
    torch.set_num_threads(threads if threads is not None else default_threads())
    if kind is KernelKind.TRITON:
        _start_interpreter()
    return Device(torch.device("cpu"), kind)


def default_threads() -> int:
    """Query: threads for compute on a CPU: all cores but one, which copies and the loop share."""
    return max((os.cpu_count() or 2) - 1, 1)


def host_memory_bytes() -> int:
    """Query: bytes of host memory that are available now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _start_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RealRunError(
            "--kernels triton on a CPU needs Triton's interpreter: set TRITON_INTERPRET=1 in the environment"
        )
    from hisparsim_kernels.interpreter import activate

    activate()
