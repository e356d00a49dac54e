"""How fast the simulator is here: ``python -m hisparsim.des.benchmark --help``.

Two targets: 10,000 requests of a Poisson process (4 a second, 1,024 tokens in, 128 out, ``gpu-only``) in at
most 2 s of loop (5,000 requests a second), and the 4,000 requests of the Mooncake conversation excerpt under
``hybrid`` in at most 10 s. Each case runs in a process of its own, so that its peak memory is its own.
Processor seconds say what a loaded machine hides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hisparsim import is_compiled
from hisparsim.des.simulate import simulate
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, load, poisson

POISSON_TARGET_S = 2.0
TRACE_TARGET_S = 10.0
TRACE_REQUESTS = 4_000
SCALING = (1_000, 10_000, 100_000)
MIB = 1 << 20


@dataclass(frozen=True)
class Speed:
    """What one run took; ``loop_s`` is wall-clock time of the simulation loop."""

    name: str
    policy: str
    num_requests: int
    num_steps: int
    num_events: int
    loop_s: float
    processor_s: float
    peak_memory_mib: float
    target_s: float | None
    compiled: bool
    """The loop was compiled (``HISPARSIM_COMPILE=1``)."""

    @property
    def steps_per_event(self) -> float:
        return self.num_steps / max(self.num_events, 1)

    @property
    def us_per_request(self) -> float:
        return 1e6 * self.processor_s / max(self.num_requests, 1)


@dataclass(frozen=True)
class Case:
    """A trace, by what makes it, and a policy."""

    name: str
    policy: str
    make: Callable[..., Trace]
    arguments: tuple[object, ...]
    target_s: float | None = None


def poisson_trace(num_requests: int) -> Trace:
    """Query: the Poisson trace of the target."""
    return poisson(num_requests, 4.0, 1024, 128, seed=0)


def excerpt(path: str) -> Trace:
    """Query: the first requests of a trace file."""
    return load(path, limit=TRACE_REQUESTS)


def measure(case: Case) -> Speed:
    """Query: run a case in this process."""
    trace = case.make(*case.arguments)
    scenario = Scenario.load(overrides=[f"policy.name={case.policy}"])
    started = time.process_time()
    result = simulate(scenario, trace)
    processor_s = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Speed(
        case.name,
        case.policy,
        trace.num_requests,
        result.num_steps,
        int(result.summary["num_events"]),
        round(result.wall_s, 3),
        round(processor_s, 3),
        round(peak / MIB, 1),
        case.target_s,
        is_compiled(),
    )


def cases(trace: Path | None, scaling: bool) -> list[Case]:
    """Query: what is measured."""
    found = [Case("poisson 4/s", "gpu-only", poisson_trace, (10_000,), POISSON_TARGET_S)]
    if trace is not None:
        found.append(Case(trace.name, "hybrid", excerpt, (str(trace),), TRACE_TARGET_S))
    if scaling:
        found += [Case("poisson 4/s", "gpu-only", poisson_trace, (n,)) for n in SCALING]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Change: measure, print a table, and write JSON where asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m hisparsim.des.benchmark", description="Simulation speed."
    )
    parser.add_argument("--trace", type=Path, help="the Mooncake conversation excerpt, or another trace")
    parser.add_argument("--scaling", action="store_true", help="also 1,000 to 100,000 requests")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    speeds: list[Speed] = []
    loop = "compiled" if is_compiled() else "interpreted"
    print(f"Python {platform.python_version()}, {loop} loop")
    print(
        f"{'requests':>9}  {'policy':<9} {'loop s':>8} {'cpu s':>8} {'us/req':>8} {'steps':>9} "
        f"{'/event':>7} {'MiB':>7}"
    )
    for case in cases(given.trace, given.scaling):
        with context.Pool(1) as pool:
            speed = pool.apply(measure, (case,))
        speeds.append(speed)
        target = f"  target {speed.target_s:g} s" if speed.target_s is not None else ""
        print(
            f"{speed.num_requests:>9,}  {speed.policy:<9} {speed.loop_s:>8.2f} {speed.processor_s:>8.2f} "
            f"{speed.us_per_request:>8.0f} {speed.num_steps:>9,} {speed.steps_per_event:>7.2f} "
            f"{speed.peak_memory_mib:>7.0f}  {speed.name}{target}",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(
            json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
