"""A scenario as the flags of a real engine, each for a named version.

Where an engine has no counterpart of a policy, the flags of the nearest thing it has are given, and a note
says so: vLLM keeps pages on the GPU while it can (``hybrid``), SGLang's HiSparse never does
(``host-resident``).

Sources: vLLM's documentation of engine arguments, of the OffloadingConnector and of Hybrid HiSparse at 0.33.0
(HiSparseConnector with ``host_pool_gib``, ``device_buffer_size`` of ``hisparse_config``); SGLang's server
arguments and HiSparse guide at 0.5.23 (``top_k``, ``device_buffer_size``, ``host_to_device_ratio``; the radix
cache must be off).
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any

from hisparsim.specs.kv_layout import RowFormat
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import gpu_kv_gib
from hisparsim.specs.weights import GIB

from .identity import reads_host_pool

VLLM_VERSION, SGLANG_VERSION = "0.33.0", "0.5.23"
OFFLOAD_POLICY = "prefix-offload"
_VLLM_DTYPES = {
    RowFormat.FP8: "fp8",
    RowFormat.FP8_DS_MLA: "fp8_ds_mla",
    RowFormat.BF16: "bfloat16",
}
_SGLANG_DTYPES = {
    RowFormat.FP8: "fp8_e4m3",
    RowFormat.FP8_DS_MLA: "fp8_e4m3",
    RowFormat.BF16: "bfloat16",
}


@dataclass(frozen=True)
class EngineFlags:
    """Flags of one engine at one version."""

    engine: str
    version: str
    arguments: tuple[str, ...]
    note: str | None = None
    """What the flags cannot say; None where they say the scenario exactly."""

    def __str__(self) -> str:
        return shlex.join(self.arguments)


def vllm_flags(scenario: Scenario) -> EngineFlags:
    """Query: the flags of ``vllm serve MODEL`` for a scenario."""
    parallel, kv, scheduler = scenario.parallel, scenario.kv, scenario.scheduler
    drafts = scenario.speculation.draft_tokens
    arguments = ["--tensor-parallel-size", str(parallel.tp)]
    if parallel.dp > 1:
        arguments += ["--data-parallel-size", str(parallel.dp)]
    if parallel.ep:
        arguments.append("--enable-expert-parallel")
    arguments += _dtype(scenario, _VLLM_DTYPES)
    arguments += [
        "--gpu-memory-utilization", f"{kv.gpu_memory_utilization:g}",
        "--max-model-len", str(scheduler.max_model_len),
        "--max-num-seqs", str(scheduler.max_num_seqs),
        "--max-num-batched-tokens", str(scheduler.max_num_batched_tokens),
        "--enable-prefix-caching" if kv.prefix_caching else "--no-enable-prefix-caching",
        "--async-scheduling" if scheduler.async_depth > 1 else "--no-async-scheduling",
    ]  # fmt: skip
    if drafts:
        speculation = {"method": "mtp", "num_speculative_tokens": drafts}
        arguments += ["--speculative-config", _json(speculation)]
    name = scenario.policy.name
    if reads_host_pool(name):
        connector = _connector("HiSparseConnector", {"host_pool_gib": scenario.host_pool_gib})
        hot = {"hisparse_config": {"device_buffer_size": scenario.hot_rows}}
        arguments += ["--kv-transfer-config", connector, "--attention-config", _json(hot)]
    elif name == OFFLOAD_POLICY:
        size = {"cpu_bytes_to_use": int(scenario.prefix_offload_gib * GIB)}
        arguments += ["--kv-transfer-config", _connector("OffloadingConnector", size)]
    note = None
    if name == "host-resident":
        note = "vLLM has no policy that never keeps pages on the GPU: these flags are of Hybrid HiSparse"
    return EngineFlags("vllm", VLLM_VERSION, tuple(arguments), note or _dtype_note(scenario, _VLLM_DTYPES))


def sglang_flags(scenario: Scenario) -> EngineFlags:
    """Query: the flags of ``python -m sglang.launch_server --model-path MODEL`` for a scenario."""
    parallel, kv, scheduler = scenario.parallel, scenario.kv, scenario.scheduler
    drafts = scenario.speculation.draft_tokens
    arguments = ["--tp-size", str(parallel.tp * parallel.dp)]
    if parallel.dp > 1:
        arguments += ["--dp-size", str(parallel.dp), "--enable-dp-attention"]
    if parallel.ep:
        arguments += ["--ep-size", str(parallel.tp * parallel.dp)]
    arguments += _dtype(scenario, _SGLANG_DTYPES)
    arguments += [
        "--mem-fraction-static", f"{_static_share(scenario):.3f}",
        "--context-length", str(scheduler.max_model_len),
        "--max-running-requests", str(scheduler.max_num_seqs * parallel.dp),
        "--chunked-prefill-size", str(scheduler.max_num_batched_tokens),
        "--page-size", "64",
    ]  # fmt: skip
    if drafts:
        arguments += [
            "--speculative-algorithm", "EAGLE",
            "--speculative-num-steps", str(drafts),
            "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(drafts + 1),
        ]  # fmt: skip
    name = scenario.policy.name
    hisparse = reads_host_pool(name)
    if hisparse:
        sizes = {
            "top_k": scenario.model_spec.index_top_k,
            "device_buffer_size": scenario.hot_rows,
            "host_to_device_ratio": host_to_device_ratio(scenario),
        }
        arguments += ["--enable-hisparse", "--hisparse-config", _json(sizes)]
    elif name == OFFLOAD_POLICY:
        gigabytes = int(scenario.prefix_offload_gib * GIB / 1e9 / parallel.tp)
        arguments += ["--enable-hierarchical-cache", "--hicache-size", str(max(gigabytes, 1))]
    if hisparse or not kv.prefix_caching:
        arguments.append("--disable-radix-cache")
    note = None
    if hisparse and name != "host-resident":
        note = (
            "SGLang's HiSparse reads every decode from the host and shares no prefixes: expect what policy "
            f"host-resident gives, not {name}"
        )
    return EngineFlags(
        "sglang", SGLANG_VERSION, tuple(arguments), note or _dtype_note(scenario, _SGLANG_DTYPES)
    )


def host_to_device_ratio(scenario: Scenario) -> int:
    """Query: SGLang's ratio of the host pool to the KV of one GPU, whole and at most the scenario's.

    It is at least 2, SGLang's default.
    """
    return max(math.floor(scenario.host_pool_gib / gpu_kv_gib(scenario)), 2)


def _static_share(scenario: Scenario) -> float:
    """Query: share of a GPU's memory for weights and KV: what the engine takes, less the runtime reserve."""
    total = scenario.node_spec.gpu_memory_bytes(scenario.node.memory)
    return scenario.kv.gpu_memory_utilization - scenario.kv.runtime_reserve_gib * GIB / total


def _dtype(scenario: Scenario, names: dict[RowFormat, str]) -> list[str]:
    name = names.get(scenario.row_format)
    return [] if name is None else ["--kv-cache-dtype", name]


def _dtype_note(scenario: Scenario, names: dict[RowFormat, str]) -> str | None:
    if scenario.row_format in names:
        return None
    return f"row format {scenario.row_format.value} has no documented flag here: the engine chooses its own"


def _connector(name: str, extra: dict[str, Any]) -> str:
    return _json({"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra})


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
