"""The doctor: what it finds on a CPU, and what it tells an operator to mend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hisparsim.cli.app import run as command
from hisparsim_realrun.devices import open_device
from hisparsim_realrun.doctor import (
    ValidationPlan,
    estimate_s,
    examine,
    findings,
    memory_limits,
    self_tests,
)
from hisparsim_realrun.doctor_links import host_nodes, measure_host_links, on_node
from hisparsim_realrun.machine import describe_machine, versions
from hisparsim_realrun.options import RunOptions
from hisparsim_realrun.validation_workloads import POLICIES, base_scenario

GIB = 2**30


def plan(host_pool_bytes: int) -> ValidationPlan:
    return ValidationPlan("tiny-dsa", 4, 8, GIB // 16, host_pool_bytes, 12, None)


def machine(load: float = 0.1, free: int = 64 * GIB) -> dict[str, object]:
    return {"load_1min": load, "num_cores": 4, "free_memory_bytes": free}


def test_an_examination_of_this_cpu_is_whole_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = examine("cpu", threads=1, with_estimate=False)
    assert found.is_healthy
    assert found.driver is None
    assert found.plan.num_cells == 3 * len(POLICIES)
    assert found.plan.estimate_s is None
    assert all(link.h2d_bytes_per_s and link.h2d_bytes_per_s > 1e6 for link in found.links)
    assert command(["doctor", "--threads", "1", "--no-estimate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["is_healthy"] is True
    assert document["versions"]["torch"] == torch.__version__
    assert command(["doctor", "--threads", "1", "--no-estimate"]) == 0
    assert "a validation would play 12 runs of" in capsys.readouterr().out


def test_an_unknown_device_and_a_missing_gpu_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", "--device", "tpu"]) == 2
    assert "known are cpu and cuda" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert command(["doctor", "--device", "cuda"]) == 2
        assert "usable GPUs" in capsys.readouterr().err


def test_a_loaded_machine_little_memory_and_low_limits_are_named() -> None:
    device = open_device("cpu", threads=1)
    assert findings(device, memory_limits(), plan(GIB), machine()) == []
    assert "noisy" in findings(device, memory_limits(), plan(GIB), machine(load=3.5))[0]
    assert "free" in findings(device, memory_limits(), plan(GIB), machine(free=GIB))[0]


def test_the_estimate_of_a_validation_adds_up_to_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparsim_realrun.doctor.ROUGH_SCALE", 0.05)
    seconds = estimate_s(base_scenario("cpu", tmp_path), RunOptions(threads=1), tmp_path)
    assert 10 < seconds < 24 * 3600


def test_self_tests_and_links_of_a_cpu_pass() -> None:
    assert all(test.passed for test in self_tests(open_device("cpu", threads=1), 1))
    reports = measure_host_links()
    assert [report.gpu for report in reports] == [None, None]


def test_memory_can_be_placed_on_each_socket_there_is() -> None:
    for node in host_nodes():
        with on_node(node):
            assert torch.ones(1024).sum() == 1024
    with on_node(None):
        pass


def test_a_machine_names_itself_and_its_versions() -> None:
    described = describe_machine(open_device("cpu", threads=1))
    assert described["name"]
    assert described["memory_bytes"] > described["free_memory_bytes"] > 0
    assert {"python", "torch", "numpy"} <= set(versions())
