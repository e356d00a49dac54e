"""A trace of a few short requests, and a sweep over it with conditions, objectives and constraints."""

from hisparsim_traces import Trace, poisson

SWEEP = """
[axes]
policy = ["hybrid", "gpu-only"]
"kv.hot_rows" = [2048, 4096]
"kv.host_pool_gib" = [64, 128]
"workload.time_scale" = [0.5, 1.0]

[[when]]
key = "kv.hot_rows"
if = {"policy.name" = ["hybrid"]}

[objectives]
maximize = ["output_tokens_per_s"]
minimize = ["ttft_s.p99"]

[constraints]
"ttft_s.p99" = {max = 1000}
"""
NUM_SCENARIOS = 2 * 2 * 2 + 2 * 2
NUM_RUNS = 2 * 2 * 2 + 2
"""gpu-only ignores the host pool: its two sizes are one run for each rate."""


def small_trace(num_requests: int = 12, rate_per_s: float = 2.0, tokens: int = 3000) -> Trace:
    return poisson(num_requests, rate_per_s, tokens, 12, 1)
