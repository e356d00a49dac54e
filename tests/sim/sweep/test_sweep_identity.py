from pathlib import Path

import pytest
from small_sweeps import small_trace

import hisparsim
from hisparsim.serving.policies import POLICIES, policy_class
from hisparsim.sweep.columns import WALL
from hisparsim.sweep.identity import fingerprint, reads_offload_tier
from hisparsim.sweep.task import Task, run_task
from hisparsim_traces import Trace

TRACE = small_trace(6)


def mark(*overrides: str, trace: Trace = TRACE) -> str:
    return fingerprint(hisparsim.Scenario.load(None, overrides), trace)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_is_said_not_to_read_the_offload_tier_does_not_name_it(policy: str) -> None:
    names = {base.__module__ for base in policy_class(policy).__mro__ if ".policies." in base.__module__}
    folder = Path(hisparsim.__file__).parent
    sources = [(folder.parent / f"{name.replace('.', '/')}.py").read_text("utf-8") for name in names]
    assert sources
    if not reads_offload_tier(policy):
        assert not any("offload_blocks" in source for source in sources)


@pytest.mark.parametrize("policy", ["gpu-only", "prefix-offload"])
@pytest.mark.parametrize("setting", ["kv.hot_rows=8192", "kv.host_pool_gib=77"])
def test_settings_that_a_policy_without_groups_never_sees_make_no_new_run(policy: str, setting: str) -> None:
    assert mark(f"policy.name={policy}") == mark(f"policy.name={policy}", setting)


@pytest.mark.parametrize("policy", ["hybrid", "host-resident", "gpu-only"])
def test_the_offload_tier_makes_no_new_run_of_a_policy_without_one(policy: str) -> None:
    assert mark(f"policy.name={policy}") == mark(f"policy.name={policy}", "kv.prefix_offload_gib=77")


@pytest.mark.parametrize(
    "changed",
    [
        ["policy.name=gpu-only"],
        ["kv.hot_rows=8192"],
        ["kv.host_pool_gib=77"],
        ["policy.name=prefix-offload", "kv.prefix_offload_gib=77"],
        ["scheduler.max_num_seqs=7"],
        ["workload.time_scale=2"],
        ["workload.rate_per_s=2", "seed=3"],
        ["speculation.draft_tokens=1", "seed=3"],
        ["node.preset=b200x8"],
        ["slo.ttft_s=1"],
        ["policy.wait_for_write_back=false"],
    ],
)
def test_whatever_can_change_a_run_makes_a_new_one(changed: list[str]) -> None:
    assert mark(*changed[:-1]) != mark(*changed)


def test_a_written_default_is_the_default() -> None:
    assert mark() == mark("kv.hot_rows=4096", "kv.host_pool_gib=384", "seed=9")


def test_another_trace_makes_a_new_run() -> None:
    assert mark() != mark(trace=small_trace(7))


def test_the_bytes_of_a_policys_file_count(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (
        "from hisparsim.serving.policies.gpu_only import GpuOnly\nclass Mine(GpuOnly):\n    name = 'mine'\n"
    )
    file.write_text(text)
    before = mark(f"policy.name={file}:Mine")
    assert before == mark(f"policy.name={file}:Mine")
    file.write_text(text + "# changed\n")
    assert before != mark(f"policy.name={file}:Mine")
    assert mark(f"policy.name={file}:Mine") != mark(f"policy.name={file}:Mine", "kv.prefix_offload_gib=77")


@pytest.mark.parametrize(
    ("policy", "setting"),
    [
        ("gpu-only", "kv.hot_rows=8192"),
        ("prefix-offload", "kv.host_pool_gib=77"),
        ("hybrid", "kv.prefix_offload_gib=77"),
        ("hybrid", "seed=5"),
    ],
)
def test_runs_of_one_fingerprint_are_equal(policy: str, setting: str) -> None:
    records = []
    for overrides in ([f"policy.name={policy}"], [f"policy.name={policy}", setting]):
        scenario = hisparsim.Scenario.load(None, overrides)
        record = run_task(Task(fingerprint(scenario, TRACE), scenario, "t"), TRACE)
        record.pop(WALL)
        records.append(record)
    assert records[0] == records[1]
    assert records[0]["error"] is None
