"""The kernel modules, and how one of them registers what is compiled ahead of time and what is benchmarked.

A kernel module `hisparsim_kernels.<name>` has

* a data file `configs/sm_90/<name>.toml` (see `configs`): one entry a configuration;
* `AOT_CASES: tuple[AotCase, ...]`: for each kernel the jit function, the argument types and the constexprs
  that come from shapes. A case is compiled under the configuration named; its `meta` is merged in. Every
  configuration of the data file must be reached by at least one case (a test checks it);
* `BENCH_CASES: tuple[BenchCase, ...]` in the module itself or in `hisparsim_kernels.benchmarks.<name>`:
  realistic sizes. Tensors are made in `prepare(device)`, not at import;
* its name in `KERNEL_MODULES` below.

Argument types are Triton's: "*bf16", "*fp32", "*fp8e4nv", "*i32", "*i64", "*i16", "*u8" pointers, "i32",
"i64", "fp32" scalars. Every pointer is taken as 16-byte aligned, as the launcher would find it; list in
`unaligned` those that may not be. Integers known to be multiples of 16 go into `divisible_by_16`. An argument
passed as None is a constexpr None: put it into `constants`.

Files with jit functions start with this line, since Triton's front end reads no annotations but
`tl.constexpr`; their host functions are typed all the same:

    # mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

Importing this module imports no kernel. `load_modules()` does, after the caller has decided on the
interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KERNEL_MODULES = (
    "rows",
    "indexer",
    "topk",
    "resolve",
    "gather",
    "mirror",
    "pages",
    "mla_decode",
    "mla_prefill",
    "grouped_gemm",
)


@dataclass(frozen=True)
class AotCase:
    """One compilation: a jit function under one configuration, for stated argument types.

    `kernel` and `config` name an entry of the module's data file. `shape` is a short suffix where several
    cases share one configuration (for instance "mtp3"); tables show `config` or `config:shape`.
    """

    kernel: str
    config: str
    fn: Any
    types: Mapping[str, str]
    constants: Mapping[str, int | float | bool | None] = field(default_factory=dict)
    divisible_by_16: frozenset[str] = frozenset()
    unaligned: frozenset[str] = frozenset()
    shape: str = ""

    @property
    def label(self) -> str:
        """The configuration's name as tables show it."""
        return f"{self.config}:{self.shape}" if self.shape else self.config


class Roof(Enum):
    """What bounds a kernel: the peak its rate is compared with."""

    HBM = "hbm"
    TENSOR_BF16 = "tensor_bf16"
    TENSOR_FP8 = "tensor_fp8"
    PCIE = "pcie"


@dataclass(frozen=True)
class BenchRun:
    """Prepared work of one benchmark. Every callable enqueues onto existing tensors and allocates nothing, so
    that it can be captured into a CUDA graph; `reference` may allocate and is timed on a CPU only.

    `moved_bytes` counts each input read once and each output written once over the roof's memory (HBM or
    PCIe); `flops` counts multiply and add as two. `torch_op` is torch's own operation where there is one.
    """

    run: Callable[[], None]
    reference: Callable[[], object]
    moved_bytes: int
    flops: int = 0
    torch_op: Callable[[], object] | None = None


@dataclass(frozen=True)
class BenchCase:
    """One benchmark: kernel, a readable case name with its sizes, the roof, and what makes the tensors.

    `prepare(device)` allocates seeded random inputs (never zeros) on the device and returns the `BenchRun`.
    `tiny` marks a case small enough for a CPU (`bench --device cpu` runs the references of these only).
    """

    kernel: str
    case: str
    roof: Roof
    prepare: Callable[[torch.device], BenchRun]
    tiny: bool = False


def load_modules(names: tuple[str, ...] = KERNEL_MODULES) -> dict[str, ModuleType]:
    """Import the kernel modules and return them by name."""
    return {name: importlib.import_module(f"hisparsim_kernels.{name}") for name in names}


def aot_cases(names: tuple[str, ...] = KERNEL_MODULES) -> dict[str, tuple[AotCase, ...]]:
    """The ahead-of-time cases of each module. The process must not run under the interpreter."""
    return {name: module.AOT_CASES for name, module in load_modules(names).items()}


def bench_cases(names: tuple[str, ...] = KERNEL_MODULES) -> tuple[BenchCase, ...]:
    """All benchmark cases, in the order of `KERNEL_MODULES`."""
    cases: list[BenchCase] = []
    for name, module in load_modules(names).items():
        cases += getattr(module, "BENCH_CASES", ())
        if importlib.util.find_spec(f"hisparsim_kernels.benchmarks.{name}") is not None:
            cases += importlib.import_module(f"hisparsim_kernels.benchmarks.{name}").BENCH_CASES
    return tuple(cases)
