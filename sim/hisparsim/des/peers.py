"""How fast other simulators are beside this one: ``python -m hisparsim.des.peers --help``.

The Poisson workload of :mod:`hisparsim.des.benchmark`, one replica, each simulator in a process of its own.
Vidur's step times come from profiles that it fetches from a model hub. Here a constant stands in for its
predictor, as long as the mean step of our own run (as many steps) or of its default model; steps are priced
for nothing, so its time is a lower bound. Dynamo's replay uses its default engine, whose steps are shorter
and so more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SIZES = (10_000, 100_000)
VIDUR_STEP_MS = 6.1
"""Mean step of Vidur's default model: with its predictor it took 407,000 steps for these 10,000 requests."""

OURS = """
import json, sys, time
from hisparsim import Scenario, simulate
from hisparsim.des.benchmark import poisson_trace
run = simulate(Scenario.load(overrides=["policy.name=gpu-only"]), poisson_trace(int(sys.argv[1])))
mean_ms = float(run.steps["duration_ns"].mean()) / 1e6
print(json.dumps({"loop_s": run.wall_s, "num_steps": run.num_steps, "mean_step_ms": mean_ms}))
"""

VIDUR = """
import json, sys, time
from vidur.config import SimulationConfig
from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
from vidur.simulator import Simulator

num_requests, step_ms = sys.argv[1], float(sys.argv[2])
priced = []


def constant(name):
    def of_a_layer(self, batch):
        if name != "_get_mlp_layer_up_proj_execution_time":
            return 0.0
        priced.append(None)
        return step_ms / self._num_layers_per_pipeline_stage

    return of_a_layer


methods = {name: constant(name) for name in BaseExecutionTimePredictor.__abstractmethods__}
predictor = type("Constant", (BaseExecutionTimePredictor,), methods)
ExecutionTimePredictorRegistry.get = classmethod(lambda cls, kind, *rest, **named: predictor(*rest, **named))
off = ["write_metrics", "enable_chrome_trace", "store_plots"]
off += [f"store_{what}_metrics" for what in ("request", "batch", "utilization")]
sys.argv = ["vidur", *f'''
    --log_level error --cluster_config_num_replicas 1 --replica_config_num_pipeline_stages 1
    --request_generator_config_type synthetic --synthetic_request_generator_config_num_requests {num_requests}
    --length_generator_config_type fixed --fixed_request_length_generator_config_prefill_tokens 1024
    --fixed_request_length_generator_config_decode_tokens 128 --interval_generator_config_type poisson
    --poisson_request_interval_generator_config_qps 4 --replica_scheduler_config_type sarathi
    --sarathi_scheduler_config_chunk_size 8192 --sarathi_scheduler_config_batch_size_cap 256
    '''.split(), *(f"--no-metrics_config_{name}" for name in off)]
simulator = Simulator(SimulationConfig.create_from_cli_args())
started = time.perf_counter()
simulator.run()
print(json.dumps({"loop_s": time.perf_counter() - started, "num_steps": len(priced)}))
"""

DYNAMO = """
import json, sys, tempfile
from dynamo.replay.main import main
with tempfile.NamedTemporaryFile(suffix=".json") as report:
    main(f"--input-tokens 1024 --output-tokens 128 --request-count {sys.argv[1]} --request-rate 4 "
         f"--num-workers 1 --replay-mode offline --report-json {report.name}".split())
    print()
    print(json.dumps({"loop_s": json.load(open(report.name))["wall_time_ms"] / 1e3}))
"""


@dataclass(frozen=True)
class PeerSpeed:
    """One run of one simulator."""

    name: str
    num_requests: int
    loop_s: float
    """Its own event loop, by its own clock."""
    process_s: float
    """From start to exit, imports and output included."""
    num_steps: int | None
    memory_mib: float
    """Peak, as the kernel counts it: at least the caller's own, with which a child begins."""


def run_script(
    name: str, python: str, script: str, num_requests: int, *arguments: str, path: str | None = None
) -> tuple[PeerSpeed, Mapping[str, float]]:
    """Query: run a script that ends with one line of JSON; its speed, and what it told.

    Raises:
        SystemExit: it failed; with the last line of what it said.
    """
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(path) if path else ""}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            [os.path.abspath(python), "-c", script, str(num_requests), *arguments],
            env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process_s = time.perf_counter() - started
        said.seek(0)
        lines = said.read().strip().splitlines()
    if status:
        raise SystemExit(f"error: {name} failed: {lines[-1] if lines else status}")
    told = json.loads(lines[-1])
    steps = told.get("num_steps")
    speed = PeerSpeed(name, num_requests, told["loop_s"], process_s, steps, usage.ru_maxrss / 1024)
    return speed, told


def main(arguments: Sequence[str] | None = None) -> None:
    """Change: measure all side by side, print a table, and write JSON where asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m hisparsim.des.peers", description="Other simulators' speed."
    )
    parser.add_argument("--compiled", help="folder of a compiled hisparsim")
    parser.add_argument("--vidur", help="Python of an environment with vidur")
    parser.add_argument("--dynamo", help="Python of an environment with ai-dynamo")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    print(f"{'simulator':<24} {'requests':>9} {'loop s':>8} {'process s':>10} {'steps':>9} {'MiB':>6}")
    speeds: list[PeerSpeed] = []

    def show(speed: PeerSpeed) -> None:
        speeds.append(speed)
        steps = f"{speed.num_steps:,}" if speed.num_steps is not None else "-"
        print(
            f"{speed.name:<24} {speed.num_requests:>9,} {speed.loop_s:>8.2f} {speed.process_s:>10.2f} "
            f"{steps:>9} {speed.memory_mib:>6.0f}",
            flush=True,
        )

    for size in SIZES:
        ours, told = run_script("hisparsim", sys.executable, OURS, size)
        show(ours)
        if given.compiled:
            show(run_script("hisparsim, compiled", sys.executable, OURS, size, path=given.compiled)[0])
        if given.vidur:
            step_ms = f"{told['mean_step_ms']:.3f}"
            show(run_script("vidur, our steps", given.vidur, VIDUR, size, step_ms)[0])
            if size == SIZES[0]:
                show(run_script("vidur, its steps", given.vidur, VIDUR, size, str(VIDUR_STEP_MS))[0])
        if given.dynamo:
            show(run_script("dynamo replay", given.dynamo, DYNAMO, size)[0])
    if given.json is not None:
        given.json.write_text(
            json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
