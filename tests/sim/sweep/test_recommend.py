import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hisparsim
from hisparsim.cli.app import run
from hisparsim.sweep.columns import METRICS
from hisparsim.sweep.ranking import Constraint
from hisparsim.sweep.recommend import Tried, choose
from hisparsim_traces import Trace, conversations, poisson
from hisparsim_traces.formats.own_parquet import write


def recommend(
    capsys: pytest.CaptureFixture[str], trace: Trace, tmp_path: Path, *arguments: str
) -> dict[str, Any]:
    path = tmp_path / "trace.parquet"
    write(trace, path)
    assert run(["recommend", str(path), "--jobs", "1", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_conversations_that_outgrow_the_gpu_get_hybrid_residency_and_not_ordinary_offload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The OpenHands shape at concurrency 32, four of its thirteen turns."""
    trace = conversations(32, 4, 74_160, 753, 220)
    flags = ["--concurrency", "32", "--node", "h200x8", "--model", "glm-5.3"]
    flags += ["--policy", "prefix-offload", "--policy", "hybrid"]
    found = recommend(capsys, trace, tmp_path, *flags)
    assert found["policy"] == found["scenario"]["policy"]["name"] == "hybrid"
    assert found["scenario"]["model"]["preset"] == "glm-5.3"
    assert found["margin"] > 0.1
    assert found["next_best"][0]["policy.name"] == "prefix-offload"
    assert "HiSparseConnector" in found["flags"]["vllm"]
    assert "--enable-hisparse" in shlex.split(found["flags"]["sglang"])
    assert found["versions"] == {"vllm": "0.33.0", "sglang": "0.5.23"}
    assert found["text"].startswith("Use policy hybrid")
    changes = [move["change"] for move in found["sensitivity"]]
    assert {"twice the hot rows", "half the host pool"} <= set(changes)


def test_short_prompts_without_pressure_get_the_simplest_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = poisson(60, 2.0, 1000, 40, 3)
    found = recommend(capsys, trace, tmp_path, "--slo", "ttft_s.p99=2", "--slo", "tpot_s.p50=0.05")
    assert found["policy"] == "gpu-only"
    assert found["meets_slo"]
    assert 0 < found["margin"] < 1
    assert found["bound_by"] in ("arrivals", "compute")
    assert "--kv-transfer-config" not in found["flags"]["vllm"]
    assert "--enable-hisparse" not in found["flags"]["sglang"]
    assert {"a load of 80 %", "a load of 125 %"} <= {move["change"] for move in found["sensitivity"]}


def test_objectives_that_nothing_meets_are_said_and_the_nearest_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--slo", "tpot_s.p50=0.0001", "--policy", "gpu-only"]
    found = recommend(capsys, poisson(8, 2.0, 500, 10, 3), tmp_path, *flags)
    assert not found["meets_slo"]
    assert found["margin"] < 0
    assert "Nothing that was tried meets the objectives" in found["text"]


def test_what_the_user_sets_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--set",
        "kv.hot_rows=6144",
        "--set",
        "scheduler.max_num_batched_tokens=8192",
        "--policy",
        "hybrid",
    ]
    found = recommend(capsys, poisson(8, 2.0, 500, 10, 3), tmp_path, *flags)
    assert found["scenario"]["kv"]["hot_rows"] == 6144
    assert found["scenario"]["scheduler"]["max_num_batched_tokens"] == 8192
    assert not any("hot rows" in move["change"] for move in found["sensitivity"])


def test_the_answer_is_plain_text_with_flags_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.parquet"
    write(poisson(8, 2.0, 500, 10, 3), path)
    assert run(["recommend", str(path), "--jobs", "1", "--slo", "ttft_s.p99=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Use policy gpu-only: ")
    assert "It meets every objective; the tightest is ttft_s.p99 <= 2 with " in shown
    assert "\nvllm 0.33.0:\nvllm serve MODEL --tensor-parallel-size 8 " in shown
    assert "\nsglang 0.5.23:\npython -m sglang.launch_server --model-path MODEL --tp-size 8 " in shown


def tried(policy: str, **metrics: float) -> Tried:
    scenario = hisparsim.Scenario.load(None, [f"policy.name={policy}"])
    record: Mapping[str, Any] = {
        **dict.fromkeys(METRICS),
        **{k.replace("__", "."): v for k, v in metrics.items()},
    }
    return Tried({"policy.name": policy}, scenario, record)


def test_the_choice_follows_its_criteria_in_order() -> None:
    slow = tried("gpu-only", output_tokens_per_s=100, tpot_s__mean=0.01, ttft_s__p99=1)
    fast = tried("hybrid", output_tokens_per_s=120, tpot_s__mean=0.02, ttft_s__p99=2)
    near = tried("host-resident", output_tokens_per_s=119, tpot_s__mean=0.03, ttft_s__p99=2)
    same = tried("gpu-only", output_tokens_per_s=119, tpot_s__mean=0.02, ttft_s__p99=2)
    assert choose([slow, fast], ()) is fast
    assert choose([slow, fast], [Constraint("ttft_s.p99", max=1.5)]) is slow
    assert choose([near, fast], ()) is fast
    assert choose([fast, same], ()) is same
    assert choose([slow, fast], [Constraint("ttft_s.p99", max=0.5)]) is slow


def test_a_policy_that_cannot_run_here_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", "kv.host_pool_gib=0.001", "--policy", "hybrid", "--policy", "gpu-only"]
    found = recommend(capsys, poisson(4, 2.0, 500, 10, 3), tmp_path, *flags)
    assert found["policy"] == "gpu-only"
    assert "Policy hybrid cannot run here: the host pool holds" in found["text"]
