"""Launch configurations: data files, one folder an architecture, one TOML file a kernel module.

    configs/<arch>/<module>.toml, e.g. configs/sm_90/mla_decode.toml

    [[config]]
    kernel = "mla_decode_split_bf16"      # the kernel's name in tables
    name = "h16"                          # unique for the kernel; code asks for it by this name
    meta = { BLOCK_HEADS = 16, BLOCK_ROWS = 32 }   # constexpr arguments the configuration decides
    num_warps = 4
    num_stages = 2
    why = "one sentence: what it is for, and what was tried beside it"
    [config.measured]                     # by triton 3.6.0, ahead of time for sm_90a
    registers = 184
    shared_bytes = 56448
    tensor_core = { HMMA = 68 }
    async_copy_128 = 40
    [config.limits]                       # the gate fails past these
    registers = 200                       # default 255
    shared_bytes = 65536                  # default 232448, Hopper's most for one block
    tensor_core = "HMMA"                  # this instruction must appear; default none is required
    async_copy_128 = 1                    # at least this many; default 0
    stack_bytes = 0                       # default 0
    spill_instructions = 0                # default 0
    narrow_loads = 0                      # loads of 1 or 2 bytes; default 0

An architecture without a file of its own for a module uses sm_90's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from hisparsim_kernels.errors import ConfigError

FALLBACK_ARCH = "sm_90"
HOPPER_SHARED_BYTES = 232448
"""Most dynamic shared memory of one block on Hopper (227 KiB; CUDA programming guide, compute capability
9.0).
"""
MAX_REGISTERS = 255
TENSOR_CORE_INSTRUCTIONS = ("HGMMA", "QGMMA", "HMMA", "QMMA", "UTCHMMA", "UTCQMMA", "IMMA")


@dataclass(frozen=True)
class ResourceLimits:
    """What a compiled configuration may use, and what its machine code must contain.

    `tensor_core` names an instruction that must appear (None: none is required); `async_copy_128` is the
    least number of 16-byte asynchronous copies from global to shared memory (LDGSTS...128 in the
    disassembly), `narrow_loads` the most loads of 1 or 2 bytes: more of them mean that an alignment was lost.
    """

    registers: int = MAX_REGISTERS
    stack_bytes: int = 0
    spill_instructions: int = 0
    shared_bytes: int = HOPPER_SHARED_BYTES
    tensor_core: str | None = None
    async_copy_128: int = 0
    narrow_loads: int = 0

    def __post_init__(self) -> None:
        if self.tensor_core is not None and self.tensor_core not in TENSOR_CORE_INSTRUCTIONS:
            known = ", ".join(TENSOR_CORE_INSTRUCTIONS)
            raise ConfigError(f"tensor_core is {self.tensor_core!r}; known instructions are {known}")


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is compiled and launched: its block shapes (`meta`), warps and pipeline stages."""

    kernel: str
    name: str
    num_warps: int
    num_stages: int
    meta: Mapping[str, int | bool] = field(default_factory=dict)
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    measured: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16) or self.num_stages < 1:
            raise ConfigError(
                f"{self.kernel}/{self.name} has num_warps {self.num_warps}, num_stages {self.num_stages}; "
                "warps must be a power of two up to 16 and stages at least 1"
            )

    def launch_arguments(self) -> dict[str, int | bool]:
        """Keyword arguments of `kernel[grid](...)`: the constexprs, `num_warps` and `num_stages`."""
        return {**self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages}


@cache
def _load(module: str, arch: str) -> dict[tuple[str, str], LaunchConfig]:
    folder = resources.files(__name__)
    path = folder / arch / f"{module}.toml"
    if not path.is_file():
        path = folder / FALLBACK_ARCH / f"{module}.toml"
    if not path.is_file():
        raise ConfigError(f"no configuration file {FALLBACK_ARCH}/{module}.toml; a kernel module needs one")
    table: dict[tuple[str, str], LaunchConfig] = {}
    for entry in tomllib.loads(path.read_text())["config"]:
        config = LaunchConfig(**{**entry, "limits": ResourceLimits(**entry.get("limits", {}))})
        if (config.kernel, config.name) in table:
            raise ConfigError(f"{path} defines {config.kernel}/{config.name} twice; names must be unique")
        table[config.kernel, config.name] = config
    return table


def configs_of(module: str, arch: str = FALLBACK_ARCH) -> tuple[LaunchConfig, ...]:
    """All configurations of one kernel module on `arch` (sm_90 stands in where it has no file)."""
    return tuple(_load(module, arch).values())


def find_config(module: str, kernel: str, name: str, arch: str = FALLBACK_ARCH) -> LaunchConfig:
    """The configuration `name` of `kernel`. Raises `ConfigError` listing the known names."""
    table = _load(module, arch)
    if (kernel, name) not in table:
        known = ", ".join(sorted(n for k, n in table if k == kernel)) or "none for this kernel"
        raise ConfigError(f"{module} has no configuration {kernel}/{name} on {arch}; known: {known}")
    return table[kernel, name]
