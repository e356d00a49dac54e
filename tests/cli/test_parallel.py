import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_simulation import leave, square

from hisparsim.cli.parallel import WorkerDiedError, run_each


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_come_in_the_items_order_whatever_the_number_of_workers(num_workers: int) -> None:
    reported: dict[int, int] = {}
    heard: dict[int, int] = {}
    results = run_each(square, [3, 1, 2], num_workers, reported.__setitem__, heard.__setitem__)
    assert results == [9, 1, 4]
    assert reported == {0: 3, 1: 1, 2: 2}
    assert heard == {0: 9, 1: 1, 2: 4}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_first_error_is_raised_as_itself(num_workers: int) -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        run_each(square, [2, -1, 3], num_workers, lambda *_: None, lambda *_: None)


def test_a_worker_that_is_gone_is_one_clear_error() -> None:
    with pytest.raises(WorkerDiedError, match=r"killed, or out of memory.*--jobs 1"):
        run_each(leave, [1, 2], 2, lambda *_: None, lambda *_: None)


INTERRUPTED_RUN = """
import signal, sys
sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)
from fake_simulation import nap
from hisparsim.cli.parallel import run_each

if __name__ == "__main__":
    try:
        run_each(nap, [60.0, 60.0, 60.0], 2, lambda i, n: n and print("begun", flush=True), lambda i, r: None)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_ends_the_workers_at_once_and_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "interrupted_run.py"
    script.write_text(INTERRUPTED_RUN)
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, script, here, here.parent / "results"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    shown, complaints = process.communicate(timeout=30)
    assert shown.splitlines()[-1] == "interrupted"
    assert complaints == ""
    assert process.returncode == 0


REPLAY = """
import sys
from hisparsim.cli.app import main
sys.argv[1:] = ["replay", "conversation", "--jobs", "2", "--out", "out", "--set", "workload.time_scale=0.3"]
if __name__ == "__main__":
    main()
"""


def test_two_interrupts_of_a_replay_end_in_one_line_and_leave_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", REPLAY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.send_signal(signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    shown, complaints = process.communicate(timeout=30)
    assert shown == ""
    assert complaints.splitlines()[-1] == "hisparsim: interrupted"
    assert "Traceback" not in complaints
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
