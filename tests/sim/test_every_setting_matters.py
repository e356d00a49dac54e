"""Every scenario key moves the outputs that it should move, in the right direction.

A setting that moves a hit rate and no latency is worse than none. Each case runs one small trace twice and
compares one output; a key or a policy's switch without a case fails the last tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from hisparsim import simulate
from hisparsim.results.metrics import compute_metrics
from hisparsim.results.records import RunResult
from hisparsim.serving.policies import POLICIES, policy_class
from hisparsim.specs.scenario import Scenario, known_keys
from hisparsim_traces import Trace, conversations, poisson

ELSEWHERE = {
    "cost.source": "tests/sim/cost: each source against its figures; the second one needs a file",
    "cost.calibration": "tests/sim/cost: the file of cost.source=calibration:FILE",
}
"""Keys that need more than a small trace, and where they are tested."""


@cache
def trace(kind: str) -> Trace:
    """A small trace: few requests, long enough to press on a small pool."""
    match kind:
        case "pressed":  # prompts of 20k to 60k tokens, faster than a small pool serves them
            return poisson(24, 2.0, (20_000, 60_000), (40, 160), seed=1)
        case "light":
            return poisson(30, 2.0, (1_000, 4_000), (40, 160), seed=2)
        case "decodes":
            return poisson(24, 8.0, (4_000, 6_000), (300, 500), seed=3)
        case "turns":
            return conversations(6, 4, 20_000, (800, 1_200), 120, think_s=0.5, seed=4)
        case "mixed":  # some longer than a window of 40,000 tokens
            return poisson(12, 4.0, (30_000, 50_000), 60, seed=5)
        case "warm":  # a pool of conversations that evict each other
            return conversations(16, 4, 30_000, 1_000, 100, think_s=1.0, seed=6)
    raise KeyError(kind)


SMALL = ("kv.gpu_kv_gib=6",)
"""A GPU pool that a few long prompts fill."""
HALF_NODE = ("node.preset=b300x8", "model.weights=nvfp4", "parallel.tp=4")
"""A replica that takes half a node, so that two fit."""
TWO_REPLICAS = (*HALF_NODE, "parallel.dp=2")
FAST = ("workload.time_scale=0.1",)
SMALL_AND_FAST = (*SMALL, *FAST)
DRAFTS = ("speculation.draft_tokens=3",)
SHORT_WINDOW = ("scheduler.max_model_len=40000",)
FAR_HOST = (*SMALL, "node.host_placement=one-socket")


@dataclass(frozen=True)
class Case:
    """Setting ``key`` from ``before`` to ``after`` moves ``metric`` up, down, or somewhere (differs)."""

    key: str
    before: object
    after: object
    metric: str
    moves: str
    policy: str = "hybrid"
    trace: str = "pressed"
    given: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.key} {self.before} to {self.after}: {self.metric} {self.moves} under {self.policy}"


CASES = (
    Case("model.preset", "glm-5.3", "glm-5", "tpot_s.mean", "up", trace="light"),
    Case("model.preset", "glm-5.3", "glm-5", "num_gpu_blocks", "down", "gpu-only", "light"),
    Case("model.weights", "fp8", "nvfp4", "num_gpu_blocks", "up", trace="light"),
    Case("model.weights", "fp8", "w4a8", "tpot_s.mean", "down", trace="light"),
    Case("node.preset", "h200x8", "b200x8", "ttft_s.mean", "down", trace="light"),
    Case("node.memory", "nominal", "reported", "num_gpu_blocks", "up", trace="light"),
    Case("node.memory", "nominal", "reported", "mean_running", "up", "gpu-only", given=FAST),
    Case("node.host_placement", "local", "one-socket", "tpot_s.mean", "up", given=SMALL),
    Case("node.host_placement", "local", "interleaved", "tpot_s.mean", "up", given=SMALL),
    Case("parallel.tp", 4, 8, "ttft_s.mean", "down", trace="light", given=HALF_NODE[:2]),
    Case("parallel.dp", 1, 2, "ttft_s.mean", "down", given=(*HALF_NODE, *FAST)),
    Case("parallel.ep", False, True, "num_gpu_blocks", "up", trace="light", given=TWO_REPLICAS),
    Case("parallel.ep", False, True, "tpot_s.mean", "differs", trace="light", given=TWO_REPLICAS),
    Case("kv.dtype", "fp8", "bf16", "gpu_block_bytes", "up", trace="light"),
    Case("kv.dtype", "fp8", "bf16", "mean_running", "down", "gpu-only", given=SMALL),
    Case("kv.hot_rows", 4096, 8192, "hot_hit_rate", "up", given=SMALL),
    Case("kv.hot_rows", 4096, 8192, "h2d_bytes_a_token", "down", given=SMALL),
    Case("kv.hot_rows", 4096, 8192, "gather_ns_a_decode", "down", given=SMALL),
    Case("kv.hot_rows", 4096, 16384, "mean_running", "down", given=SMALL),
    Case("kv.host_pool_gib", 12, 384, "ttft_s.mean", "down", given=SMALL),
    Case("kv.host_pool_gib", 12, 384, "mean_running", "up", "host-resident", given=SMALL),
    Case("kv.prefix_offload_gib", 8, 512, "h2d_bytes", "up", "prefix-offload", "warm", SMALL),
    Case("kv.prefix_offload_gib", 8, 512, "ttft_s.mean", "down", "prefix-offload", "warm", SMALL),
    Case("kv.gpu_memory_utilization", 0.88, 0.92, "num_gpu_blocks", "up", trace="light"),
    Case("kv.gpu_memory_utilization", 0.86, 0.92, "ttft_s.mean", "down", "gpu-only"),
    Case("kv.runtime_reserve_gib", 15, 10, "num_gpu_blocks", "up", trace="light"),
    Case("kv.gpu_kv_gib", 6, 20, "ttft_s.mean", "down", "gpu-only"),
    Case("kv.gpu_kv_gib", 6, 20, "ttft_s.mean", "down", "hybrid"),
    Case("kv.num_gpu_blocks", 30_000, 90_000, "mean_running", "up"),
    Case("kv.prefix_caching", False, True, "ttft_s.mean", "down", trace="turns"),
    Case("kv.prefix_caching", False, True, "prefix_hit_tokens", "up", "gpu-only", "turns"),
    Case("scheduler.max_num_seqs", 2, 64, "ttft_s.mean", "down", "gpu-only", "light"),
    Case("scheduler.max_num_seqs", 2, 64, "mean_running", "up", trace="light"),
    Case("scheduler.max_num_batched_tokens", 2048, 32768, "itl_s.p99", "up", "gpu-only"),
    Case("scheduler.max_num_batched_tokens", 2048, 32768, "num_steps", "down", "gpu-only"),
    Case("scheduler.max_model_len", 40_000, 142_000, "num_finished", "up", trace="mixed"),
    Case("scheduler.async_depth", 1, 2, "ttft_s.mean", "up", "gpu-only", "decodes"),
    Case("scheduler.watermark", 0.0, 0.4, "mean_running", "down", "gpu-only", given=SMALL),
    Case("policy.name", "gpu-only", "hybrid", "mean_running", "up", given=SMALL),
    Case("policy.name", "gpu-only", "host-resident", "h2d_bytes", "up", given=SMALL),
    Case("speculation.draft_tokens", 0, 3, "tpot_s.mean", "down", trace="light"),
    Case("speculation.acceptance", 0.1, 0.95, "tpot_s.mean", "down", trace="light", given=DRAFTS),
    Case("cost.resolve_us", 0, 100, "tpot_s.mean", "up", trace="light"),
    Case("cost.front_end", False, True, "ttft_s.mean", "up", trace="light"),
    Case("links.h2d_gb_per_s", 2, 50, "ttft_s.mean", "down", "prefix-offload", "warm", SMALL),
    Case("links.d2h_gb_per_s", 2, 50, "output_tokens_per_s", "up", "host-resident", given=SMALL),
    Case("links.d2h_gb_per_s", 0.2, 50, "tpot_s.mean", "down", given=SMALL),
    Case("links.gather_gb_per_s", 5, 50, "tpot_s.mean", "down", given=SMALL),
    Case("links.host_dram_gb_per_s", 40, 1000, "tpot_s.mean", "down", given=SMALL),
    Case("links.overlap", 0, 1, "tpot_s.mean", "down", given=SMALL),
    Case("links.socket_gb_per_s", 10, 500, "tpot_s.mean", "down", given=FAR_HOST),
    Case("locality.profile", "high-overlap", "low-overlap", "hot_hit_rate", "down", given=SMALL),
    Case("locality.profile", "high-overlap", "low-overlap", "tpot_s.mean", "up", given=SMALL),
    Case("workload.time_scale", 1.0, 0.1, "ttft_s.mean", "up", "gpu-only"),
    Case("workload.time_scale", 1.0, 0.1, "offered_load", "up", "gpu-only"),
    Case("workload.limit", 10, 20, "num_requests", "up", trace="light"),
    Case("workload.concurrency", 1, 8, "output_tokens_per_s", "up", trace="light"),
    Case("workload.rate_per_s", 0.2, 20, "ttft_s.mean", "up", trace="light"),
    Case("workload.warmup_s", 0, 5, "num_measured", "down", trace="light"),
    Case("workload.over_length", "reject", "truncate", "num_finished", "up", "hybrid", "mixed", SHORT_WINDOW),
    Case("workload.over_length", "reject", "skip", "num_rejected", "down", trace="mixed", given=SHORT_WINDOW),
    Case("slo.ttft_s", 0.2, 10, "goodput_per_s", "up", trace="light"),
    Case("slo.tpot_s", 0.02, 10, "goodput_per_s", "up", trace="light"),
    Case("slo.e2e_s", 1, 100, "goodput_per_s", "up", trace="light"),
    Case("seed", 0, 1, "ttft_s.mean", "differs", trace="light", given=("workload.rate_per_s=2",)),
    # The policies' own switches.
    Case("policy.wait_for_write_back", False, True, "num_stall_steps", "up", given=SMALL_AND_FAST),
    Case("policy.transition_on_watermark", False, True, "num_none", "up", given=FAST),
    Case("policy.lease_next_step", False, True, "ttft_s.mean", "differs", given=SMALL_AND_FAST),
    Case("policy.eager_host_mirror", True, False, "peak_d2h_bytes", "differs", given=SMALL),
    Case("policy.indexer_offload", False, True, "computed_tokens", "down", trace="warm", given=SMALL),
)  # fmt: skip


@cache
def outcome(policy: str, kind: str, overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """All outputs of a run by their dotted names, and a few sums of its steps."""
    result = simulate(Scenario.load(overrides=[f"policy.name={policy}", *overrides]), trace(kind))
    steps = result.steps
    return {
        **result.summary,
        **compute_metrics(result).flat(),
        "num_none": weighted_mean(result, "num_none"),
        "computed_tokens": int(steps["prefill_tokens"].sum()),
        "gather_ns_a_decode": int(steps["cost_hot_gather_ns"].sum())
        / max(int(steps["num_decodes"].sum()), 1),
        "h2d_bytes_a_token": int(result.summary["h2d_bytes"]) / int(result.requests["output_tokens"].sum()),
        "peak_d2h_bytes": int(steps["d2h_bytes"].max()),
        "num_rejected": int((result.requests["status"] == 3).sum()),
    }


def weighted_mean(result: RunResult, column: str) -> float:
    """A column of the steps averaged over time."""
    steps = result.steps
    return float(np.average(steps[column], weights=steps["duration_ns"]))


def moved(case: Case) -> tuple[Any, Any]:
    """The output before and after."""
    found = []
    for value in (case.before, case.after):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        policy = text if case.key == "policy.name" else case.policy
        own = () if case.key == "policy.name" else (f"{case.key}={text}",)
        found.append(outcome(policy, case.trace, (*case.given, *own))[case.metric])
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_setting_moves_its_output(case: Case) -> None:
    before, after = moved(case)
    assert before is not None and after is not None
    if case.moves == "up":
        assert after > before
    elif case.moves == "down":
        assert after < before
    else:
        assert after != before


def test_every_key_has_a_case() -> None:
    covered = {case.key for case in CASES} | set(ELSEWHERE)
    assert set(known_keys()) <= covered


def test_every_switch_of_a_policy_has_a_case() -> None:
    switches = {f"policy.{option}" for name in POLICIES for option in policy_class(name).options}
    assert switches <= {case.key for case in CASES}
