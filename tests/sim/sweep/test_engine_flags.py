"""The flags of `recommend` against the documented options of each engine, and read back as a scenario."""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import hisparsim
from hisparsim.launch import translate_command
from hisparsim.specs.setup import gpu_kv_gib
from hisparsim.sweep.engine_flags import EngineFlags, sglang_flags, vllm_flags

Kind = Callable[[str], Any] | None
"""Reads an option's value and fails on one of a wrong type; None = a switch without a value."""


def one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        assert text in known
        return text

    return read


def share(text: str) -> float:
    assert 0 < float(text) <= 1
    return float(text)


def whole(value: Any) -> None:
    assert isinstance(value, int) and not isinstance(value, bool) and value > 0


def number(value: Any) -> None:
    assert isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def record(**fields: Any) -> Callable[[Any], Any]:
    """A JSON object with these fields and no other; a field's value is compared, or checked by a function."""

    def read(given: Any) -> Any:
        value = json.loads(given) if isinstance(given, str) else given
        assert set(value) == set(fields)
        for name, kind in fields.items():
            if callable(kind):
                kind(value[name])
            else:
                assert value[name] == kind
        return value

    return read


def connector(text: str) -> Any:
    """vLLM's KVTransferConfig for the two connectors that are recommended."""
    name = json.loads(text)["kv_connector"]
    extra = {
        "HiSparseConnector": record(host_pool_gib=number),
        "OffloadingConnector": record(cpu_bytes_to_use=whole),
    }
    return record(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra[name])(text)


VLLM_0_33_0: Mapping[str, Kind] = {
    "--tensor-parallel-size": int,
    "--data-parallel-size": int,
    "--enable-expert-parallel": None,
    "--kv-cache-dtype": one_of("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
    "--gpu-memory-utilization": share,
    "--max-model-len": int,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": int,
    "--enable-prefix-caching": None,
    "--no-enable-prefix-caching": None,
    "--async-scheduling": None,
    "--no-async-scheduling": None,
    "--speculative-config": record(method="mtp", num_speculative_tokens=whole),
    "--kv-transfer-config": connector,
    "--attention-config": record(hisparse_config=record(device_buffer_size=whole)),
}
SGLANG_0_5_23: Mapping[str, Kind] = {
    "--tp-size": int,
    "--dp-size": int,
    "--enable-dp-attention": None,
    "--ep-size": int,
    "--kv-cache-dtype": one_of("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
    "--mem-fraction-static": share,
    "--context-length": int,
    "--max-running-requests": int,
    "--chunked-prefill-size": int,
    "--page-size": int,
    "--speculative-algorithm": one_of("EAGLE"),
    "--speculative-num-steps": int,
    "--speculative-eagle-topk": int,
    "--speculative-num-draft-tokens": int,
    "--enable-hisparse": None,
    "--hisparse-config": record(top_k=whole, device_buffer_size=whole, host_to_device_ratio=whole),
    "--disable-radix-cache": None,
    "--enable-hierarchical-cache": None,
    "--hicache-size": int,
}


def parse(flags: EngineFlags, known: Mapping[str, Kind]) -> dict[str, Any]:
    """What a shell hands to the engine, by option; fails on an unknown option or a value of a wrong type."""
    words = shlex.split(str(flags))
    parsed: dict[str, Any] = {}
    while words:
        option = words.pop(0)
        kind = known[option]
        assert option not in parsed
        parsed[option] = True if kind is None else kind(words.pop(0))
    return parsed


SCENARIOS = {
    "hybrid": ["policy.name=hybrid", "kv.hot_rows=6144", "kv.host_pool_gib=300"],
    "host-resident": ["policy.name=host-resident"],
    "gpu-only": ["policy.name=gpu-only", "kv.prefix_caching=false", "scheduler.async_depth=1"],
    "prefix-offload": ["policy.name=prefix-offload", "kv.prefix_offload_gib=256"],
    "mtp": ["policy.name=hybrid", "speculation.draft_tokens=3"],
    "dp": [
        "policy.name=hybrid",
        "parallel.tp=1",
        "parallel.dp=8",
        "parallel.ep=true",
        "kv.host_pool_gib=100",
    ],
    "bf16": ["policy.name=hybrid", "kv.dtype=bf16"],
    "fp8": ["policy.name=gpu-only", "kv.dtype=fp8"],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_vllm_flags_are_documented_options_of_0_33_0(name: str) -> None:
    scenario = hisparsim.Scenario.load(None, SCENARIOS[name])
    flags = vllm_flags(scenario)
    parsed = parse(flags, VLLM_0_33_0)
    assert flags.version == "0.33.0"
    assert parsed["--max-num-seqs"] == scenario.scheduler.max_num_seqs
    assert ("--attention-config" in parsed) == (scenario.policy.name in ("hybrid", "host-resident"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_sglang_flags_are_documented_options_of_0_5_23(name: str) -> None:
    scenario = hisparsim.Scenario.load(None, SCENARIOS[name])
    flags = sglang_flags(scenario)
    parsed = parse(flags, SGLANG_0_5_23)
    assert flags.version == "0.5.23"
    hisparse = "--enable-hisparse" in parsed
    assert hisparse == (scenario.policy.name in ("hybrid", "host-resident"))
    assert not hisparse or "--disable-radix-cache" in parsed
    assert not hisparse or parsed["--hisparse-config"]["device_buffer_size"] >= 2048
    if scenario.speculation.draft_tokens:
        assert parsed["--speculative-num-draft-tokens"] == scenario.speculation.draft_tokens + 1


@pytest.mark.parametrize("name", ["hybrid", "gpu-only", "prefix-offload", "mtp", "dp", "bf16"])
def test_vllm_flags_read_back_are_the_scenario(name: str) -> None:
    scenario = hisparsim.Scenario.load(None, SCENARIOS[name])
    back = translate_command(f"vllm serve zai-org/GLM-5.3-FP8 {vllm_flags(scenario)}")
    assert back.unmodelled == ()
    read = back.scenario()
    assert read.policy.name == scenario.policy.name
    assert read.scheduler == scenario.scheduler
    assert read.parallel == scenario.parallel
    assert read.row_format is scenario.row_format
    assert read.kv.prefix_caching == scenario.kv.prefix_caching
    assert read.speculation.draft_tokens == scenario.speculation.draft_tokens
    if name in ("hybrid", "mtp", "dp", "bf16"):
        assert (read.hot_rows, read.host_pool_gib) == (scenario.hot_rows, scenario.host_pool_gib)
    if name == "prefix-offload":
        assert read.prefix_offload_gib == scenario.prefix_offload_gib


@pytest.mark.parametrize("name", ["host-resident", "gpu-only", "prefix-offload", "dp"])
def test_sglang_flags_read_back_are_the_scenario(name: str) -> None:
    overrides = [*SCENARIOS[name], *(["policy.name=host-resident"] if name == "dp" else [])]
    scenario = hisparsim.Scenario.load(None, overrides)
    read = translate_command(
        f"python -m sglang.launch_server --model-path zai-org/GLM-5.3-FP8 {sglang_flags(scenario)}"
    ).scenario()
    assert read.policy.name == scenario.policy.name
    assert read.scheduler.max_num_seqs == scenario.scheduler.max_num_seqs
    assert read.parallel == scenario.parallel
    assert gpu_kv_gib(read) == pytest.approx(gpu_kv_gib(scenario), rel=0.01)
    if name in ("host-resident", "dp"):
        assert read.hot_rows == scenario.hot_rows
        assert scenario.host_pool_gib * 0.75 < read.host_pool_gib <= scenario.host_pool_gib * 1.01
    if name == "prefix-offload":
        assert math.isclose(read.prefix_offload_gib, scenario.prefix_offload_gib, rel_tol=0.05)


def test_flags_that_only_approximate_a_policy_say_so() -> None:
    hybrid = hisparsim.Scenario.load(None, ["policy.name=hybrid"])
    resident = hisparsim.Scenario.load(None, ["policy.name=host-resident"])
    assert vllm_flags(hybrid).note is None
    assert "host-resident gives, not hybrid" in str(sglang_flags(hybrid).note)
    assert "Hybrid HiSparse" in str(vllm_flags(resident).note)
    assert sglang_flags(resident).note is None
