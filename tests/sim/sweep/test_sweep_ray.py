import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_sweeps import NUM_RUNS

ray: Any = pytest.importorskip("ray", reason="ray is not installed: pip install 'hisparsim[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes of one core each, on this machine."""
    from ray.cluster_utils import Cluster

    try:
        made = Cluster(
            initialize_head=True, connect=False, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        made.wait_for_nodes(timeout=120)
    except Exception as error:
        pytest.skip(f"a Ray cluster cannot be started here: {error}")
    yield made
    ray.shutdown()
    made.shutdown()


def sweep(*arguments: str | Path) -> int:
    from hisparsim.cli.app import run

    return run(["sweep", *map(str, arguments)])


def test_two_nodes_give_the_table_of_one_process(cluster: Any, sweep_file: Path, tmp_path: Path) -> None:
    assert sweep(sweep_file, "--out", tmp_path / "here", "--jobs", "1") == 0
    flags = ["--executor", "ray", "--address", cluster.address]
    assert sweep(sweep_file, "--out", tmp_path / "ray", *flags) == 0
    assert (tmp_path / "ray/sweep.parquet").read_bytes() == (tmp_path / "here/sweep.parquet").read_bytes()


def test_a_worker_killed_in_the_middle_changes_nothing(
    cluster: Any, sweep_file: Path, tmp_path: Path
) -> None:
    killed: list[int] = []
    out = tmp_path / "ray"

    def kill_one() -> None:
        limit = time.monotonic() + 120
        while not killed and time.monotonic() < limit:
            time.sleep(0.01)
            if 1 <= len(list((out / "runs").glob("[!.]*.parquet"))) < NUM_RUNS - 1:
                killed.extend(workers()[:1])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    flags = ["--executor", "ray", "--address", cluster.address]
    assert sweep(sweep_file, "--out", out, *flags) == 0
    killer.join()
    assert len(killed) == 1
    assert sweep(sweep_file, "--out", tmp_path / "here", "--jobs", "1") == 0
    assert (out / "sweep.parquet").read_bytes() == (tmp_path / "here/sweep.parquet").read_bytes()


def workers() -> list[int]:
    """Processes of this cluster that run a task of ours; Ray names them by it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::_work"):
            found.append(int(entry.name))
    return found


def test_an_address_where_no_cluster_answers_is_one_line(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(sweep_file, "--executor", "ray", "--address", "127.0.0.1:1") == 2
    assert "no Ray cluster answers" in capsys.readouterr().err
