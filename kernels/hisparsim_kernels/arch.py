"""Architecture of a device, as the configuration folders name it."""

from __future__ import annotations

from functools import cache

import torch

from hisparsim_kernels.configs import FALLBACK_ARCH


@cache
def arch_of(device: torch.device) -> str:
    """`sm_90` for an H200, `sm_100` for a B200. A CPU (the interpreter) answers the fallback, so that tests
    run the very block shapes that are shipped."""
    if device.type != "cuda":
        return FALLBACK_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
