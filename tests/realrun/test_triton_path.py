"""The Triton kernels behind the executor, in the interpreter at tiny sizes (a process of its own)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from conftest import Bench, loop

lengths = [(66, 3), (20, 3)]
runs = [
    Bench(policy, blocks, kernels=kernels).run(loop(lengths, 2))
    for policy, blocks, kernels in (
        ("gpu-only", 20, "torch"), ("gpu-only", 20, "triton"), ("host-resident", 40, "triton")
    )
]
gaps = np.array([float((runs[0].hidden[k] - runs[1].hidden[k]).abs().max()) for k in runs[0].hidden])
print(json.dumps({
    "close": float(np.mean(gaps < 0.1)), "median": float(np.median(gaps)),
    "different_bits": len(runs[1].differences(runs[2])), "hits": runs[2].executor.residency.counts.hit,
}))
"""


@pytest.mark.slow
def test_triton_kernels_give_the_same_bits_under_two_policies_and_the_cpu_s_values_nearly():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["different_bits"] == 0
    assert found["hits"] > 0
    assert found["close"] > 0.8  # bf16 queries and outputs; a selection flips here and there
    assert found["median"] < 0.05


def test_the_interpreter_must_be_asked_for():
    from hisparsim_realrun.devices import open_device
    from hisparsim_realrun.errors import RealRunError

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process runs the interpreter")
    with pytest.raises(RealRunError, match="TRITON_INTERPRET=1"):
        open_device("cpu", "triton")
