"""A compiled simulation loop gives the bytes of an interpreted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hisparsim import is_compiled

ROOT = Path(__file__).parents[2]
DIGEST = """
import hashlib, json, sys
from hisparsim import Scenario, is_compiled, load_trace, simulate
from hisparsim.sweep.identity import fingerprint

trace, scenario = load_trace(sys.argv[1]), Scenario.load(overrides=sys.argv[2:])
run = simulate(scenario, trace)
digest = hashlib.sha256(fingerprint(scenario, trace).encode())
for table in (run.requests, run.steps):
    for name, column in sorted(table.items()):
        digest.update(name.encode() + str(column.dtype).encode() + column.tobytes())
summary = {name: value for name, value in run.summary.items() if "wall" not in name}
digest.update(json.dumps(summary, sort_keys=True, default=str).encode())
print(is_compiled(), digest.hexdigest())
"""
SETTINGS = {
    "gpu-only": ["workload.limit=300"],
    "prefix-offload": ["workload.limit=80", "kv.num_gpu_blocks=9000"],
    "host-resident": ["workload.limit=80"],
    "hybrid": ["workload.limit=120", "speculation.draft_tokens=3"],
}


def digest(path: str, *arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    line = [sys.executable, "-c", DIGEST, *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not is_compiled(), reason="the simulation loop is not compiled here: make test-compiled")
@pytest.mark.parametrize("trace", ["openhands", "long-context"])
@pytest.mark.parametrize("policy", SETTINGS)
def test_both_loops_give_the_same_bytes(policy: str, trace: str) -> None:
    arguments = (trace, f"policy.name={policy}", *SETTINGS[policy])
    sources = os.pathsep.join(str(ROOT / name) for name in ("sim", "traces", "reports"))
    interpreted = digest(sources, *arguments)
    compiled = digest(os.environ.get("PYTHONPATH", ""), *arguments)
    assert (interpreted[0], compiled[0]) == ("False", "True")
    assert interpreted[1] == compiled[1]
