"""Other programs are measured from outside: their clock, ours, and the memory they took."""

from __future__ import annotations

import sys

import pytest

from hisparsim.des.peers import OURS, run_script

WORKS = """
import sys, time
held = bytearray(64 << 20)
time.sleep(0.2)
print("talk")
print('{"loop_s": 0.1, "num_steps": %d}' % (2 * int(sys.argv[1])))
"""


def test_a_script_s_last_line_and_what_its_process_took() -> None:
    speed, told = run_script("works", sys.executable, WORKS, 21)
    assert told == {"loop_s": 0.1, "num_steps": 42}
    assert (speed.name, speed.num_requests, speed.loop_s, speed.num_steps) == ("works", 21, 0.1, 42)
    assert speed.process_s >= 0.2
    assert speed.memory_mib >= 64


def test_our_own_run_tells_its_steps() -> None:
    speed, told = run_script("ours", sys.executable, OURS, 50)
    assert speed.num_steps is not None and speed.num_steps > 50
    assert 0 < speed.loop_s < speed.process_s
    assert told["mean_step_ms"] > 1


def test_a_script_that_fails_is_told_with_its_last_line() -> None:
    with pytest.raises(SystemExit, match="error: broken failed: ValueError: no such profile"):
        run_script("broken", sys.executable, "raise ValueError('no such profile')", 1)
