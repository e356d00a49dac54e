"""Ahead-of-time gate: compile every kernel and configuration for an architecture, without a GPU, and read
what the machine code uses.

Triton's wheel carries `ptxas`, `cuobjdump` and `nvdisasm`; the target is named explicitly, so no driver is
asked. Resources come from `cuobjdump --dump-resource-usage` (spills show as a stack frame plus LDL/STL),
dynamic shared memory from triton's metadata, the instruction mix from the disassembly. `python -m
hisparsim_kernels.aot` is the process that does it: it must not run under the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hisparsim_kernels.configs import LaunchConfig, ResourceLimits, find_config
from hisparsim_kernels.errors import AotError
from hisparsim_kernels.registry import KERNEL_MODULES, AotCase, aot_cases

CAPABILITIES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}
TENSOR_CORE = re.compile(r"\b(HGMMA|QGMMA|HMMA|QMMA|IMMA|UTCHMMA|UTCQMMA)\b")
ASYNC_COPY_128 = re.compile(r"\bLDGSTS[.\w]*\.128\b")
LOCAL_MEMORY = re.compile(r"\b(LDL|STL)\b")
NARROW_LOAD = re.compile(r"\bLDG[.\w]*\.U(?:8|16)\b")
SUCCESSORS = {"HGMMA": "UTCHMMA", "QGMMA": "UTCQMMA"}
"""What sm_100 has in place of Hopper's warpgroup products."""
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class KernelReport:
    """What one compiled case uses, and whether that is within its configuration's limits."""

    name: str
    config: str
    registers: int
    stack_bytes: int
    spill_instructions: int
    shared_bytes: int
    tensor_core: dict[str, int]
    async_copy_128: int
    narrow_loads: int
    seconds: float
    violations: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations


def violations_of(
    limits: ResourceLimits, measured: dict[str, Any], tensor_core: dict[str, int]
) -> tuple[str, ...]:
    """One line for each broken limit: the figure, the limit."""
    broken = [
        f"{field} {measured[field]} > {getattr(limits, field)}"
        for field in ("registers", "stack_bytes", "spill_instructions", "shared_bytes", "narrow_loads")
        if measured[field] > getattr(limits, field)
    ]
    if measured["async_copy_128"] < limits.async_copy_128:
        broken.append(f"async_copy_128 {measured['async_copy_128']} < {limits.async_copy_128}")
    accepted = (limits.tensor_core, SUCCESSORS.get(limits.tensor_core or ""))
    if limits.tensor_core is not None and not any(tensor_core.get(name or "") for name in accepted):
        broken.append(f"no {limits.tensor_core} instruction (found {tensor_core or 'none'})")
    return tuple(broken)


def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise AotError(
            f"{path} is missing; triton's NVIDIA backend carries it (Linux x86-64 and aarch64 wheels)"
        )
    return str(path)


def _run_tool(name: str, *arguments: str) -> str:
    done = subprocess.run([_tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AotError(f"{name} failed with {done.returncode}: {done.stderr.strip()[:400]}")
    return done.stdout


def _compile(case: AotCase, config: LaunchConfig, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.fn.arg_names
    constants = {**case.constants, **config.meta}
    missing = [name for name in names if name not in constants and name not in case.types]
    unknown = [name for name in (*constants, *case.types) if name not in names]
    if missing or unknown:
        raise AotError(
            f"{case.kernel}/{case.label}: no type or constant for {missing}; no such argument: {unknown}"
        )
    signature = {name: "constexpr" if name in constants else case.types[name] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if name not in constants
        and name not in case.unaligned
        and (signature[name].startswith("*") or name in case.divisible_by_16)
    }
    source = ASTSource(
        fn=case.fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _refused(case: AotCase, arch: str, error: Exception, seconds: float) -> KernelReport:
    """The report of a case that does not compile: no figures, the last words of the compiler's first error as
    violation."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if re.search("[a-z]", line)] or [type(cause).__name__]
    return KernelReport(
        name=case.kernel,
        config=case.label,
        registers=0,
        stack_bytes=0,
        spill_instructions=0,
        shared_bytes=0,
        tensor_core={},
        async_copy_128=0,
        narrow_loads=0,
        seconds=round(seconds, 3),
        violations=(f"does not compile for {arch}: {lines[-1].strip()[:200]}",),
    )


def compile_case(module: str, case: AotCase, arch: str) -> KernelReport:
    """Compile one case for `arch` and report its resources. One that the architecture refuses (e4m3 on
    sm_80) is a report with that as its violation. Raises `AotError` where nothing can be compiled at all."""
    from hisparsim_kernels.interpreter import is_interpreting

    if is_interpreting():
        raise AotError(
            "TRITON_INTERPRET is set: compile in a process without it (`hisparsim kernels aot` does)"
        )
    if arch not in CAPABILITIES:
        raise AotError(f"unknown architecture {arch!r}; known: {', '.join(CAPABILITIES)}")
    config = find_config(module, case.kernel, case.config, arch)
    started = time.perf_counter()
    try:
        compiled = _compile(case, config, CAPABILITIES[arch])
    except AotError:
        raise
    except Exception as error:
        return _refused(case, arch, error, time.perf_counter() - started)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = RESOURCES.search(_run_tool("cuobjdump", "--dump-resource-usage", cubin.name))
        assembly = _run_tool("nvdisasm", cubin.name)
    if usage is None:
        raise AotError(f"{case.kernel}/{case.label}: cuobjdump printed no REG and STACK figures")
    tensor_core = dict(Counter(TENSOR_CORE.findall(assembly)))
    measured = {
        "registers": int(usage[1]),
        "stack_bytes": int(usage[2]),
        "spill_instructions": len(LOCAL_MEMORY.findall(assembly)),
        "shared_bytes": int(compiled.metadata.shared),
        "async_copy_128": len(ASYNC_COPY_128.findall(assembly)),
        "narrow_loads": len(NARROW_LOAD.findall(assembly)),
    }
    return KernelReport(
        name=case.kernel,
        config=case.label,
        **measured,
        tensor_core=tensor_core,
        seconds=round(time.perf_counter() - started, 3),
        violations=violations_of(config.limits, measured, tensor_core),
    )


def report(
    arch: str, modules: tuple[str, ...] = KERNEL_MODULES, shard: int = 0, shards: int = 1
) -> dict[str, Any]:
    """Compile the cases of `modules` for `arch`: `{"arch", "triton", "kernels": [...]}`, one entry a case.

    With several shards only every `shards`-th case, from `shard` on, is compiled.
    """
    import triton

    cases = [(module, case) for module, of_module in aot_cases(modules).items() for case in of_module]
    kernels = []
    for module, case in cases[shard::shards]:
        result = compile_case(module, case, arch)
        print(f"{result.name}/{result.config} {result.seconds:.1f} s", file=sys.stderr)
        kernels.append({**asdict(result), "violations": list(result.violations), "passed": result.passed})
    return {"arch": arch, "triton": triton.__version__, "kernels": kernels}


def report_in_own_process(
    arch: str, modules: tuple[str, ...] = KERNEL_MODULES, processes: int = 2, timeout_s: float = 900.0
) -> dict[str, Any]:
    """`report` in child processes without TRITON_INTERPRET, whatever this process runs under.

    Raises `AotError` where a child fails or takes longer than `timeout_s`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "hisparsim_kernels.aot", "--arch", arch, "--modules", ",".join(modules)]
    children = [
        subprocess.Popen(
            [*command, "--shard", str(shard), "--shards", str(processes)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for shard in range(processes)
    ]
    reports: list[dict[str, Any]] = []
    try:
        for child in children:
            printed, _ = child.communicate(timeout=timeout_s)
            if child.returncode != 0:
                raise AotError(
                    f"the compiling process ended with {child.returncode}; its messages stand above"
                )
            reports.append(json.loads(printed))
    except subprocess.TimeoutExpired as error:
        raise AotError(f"compiling took more than {timeout_s:.0f} s") from error
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    total = sum(len(part["kernels"]) for part in reports)
    kernels = [reports[index % processes]["kernels"][index // processes] for index in range(total)]
    return {**reports[0], "kernels": kernels}


def main() -> None:
    """Compile and print the JSON report; used by the command line as its child process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--modules", default=",".join(KERNEL_MODULES))
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TRITON_CACHE_DIR", scratch)
        try:
            print(json.dumps(report(given.arch, tuple(given.modules.split(",")), given.shard, given.shards)))
        except AotError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
