"""Freed memory stays in the process: a step that asks for it again takes no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROBE = """
import resource, torch
from hisparsim_realrun.heap import keep_memory
kept = keep_memory() if {keeps} else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def _probe(*, keeps: bool) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(keeps=keeps)], capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_was_freed_is_taken_again_without_faults() -> None:
    kept, faults = _probe(keeps=True)
    if kept != "True":
        pytest.skip("this C library has no mallopt")
    _, before = _probe(keeps=False)
    assert faults < 100 < before
