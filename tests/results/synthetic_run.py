"""A toy server with slots instead of blocks: consistent records for tests of results and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from hisparsim.results import RequestStatus, RunResult

SCENARIO: dict[str, Any] = {
    "model": {"preset": "glm-5.3", "weights": "fp8"},
    "node": {"preset": "h200x8", "memory": "reported"},
    "parallel": {"tp": 8, "dp": 1, "ep": False},
    "workload": {"time_scale": 1.0, "warmup_s": 0.0},
    "slo": {},
    "seed": 0,
}
SLOTS = {"gpu-only": 6, "prefix-offload": 8, "host-resident": 34, "hybrid": 30}
NUM_GPU_BLOCKS = 91_047
NUM_HOST_BLOCKS = 125_829


def synthetic_run(
    policy: str = "hybrid",
    *,
    num_requests: int = 200,
    rate_per_s: float = 2.0,
    seed: int = 0,
    warmup_s: float = 0.0,
    slo: dict[str, float] | None = None,
) -> RunResult:
    """A run of a toy server: at most SLOTS[policy] requests run, each decodes a token a step."""
    rng = np.random.default_rng(seed)
    slots = SLOTS.get(policy, 16)
    offloads = policy in ("host-resident", "hybrid")
    arrival = np.sort(rng.exponential(1 / rate_per_s, num_requests).cumsum() * 1e9).astype(np.int64)
    arrival -= arrival[0]
    prompt = rng.integers(2_000, 60_000, num_requests)
    output = rng.integers(1, 160, num_requests)
    admitted, first, finish = (np.full(num_requests, -1, np.int64) for _ in range(3))
    produced = np.zeros(num_requests, np.int64)
    now, next_request, running, rows = 0, 0, [], []
    queue: list[int] = []
    gaps: dict[int, int] = {}
    last_token = np.zeros(num_requests, np.int64)
    while next_request < num_requests or queue or running:
        if not queue and not running:
            now = max(now, int(arrival[next_request]))
        while next_request < num_requests and arrival[next_request] <= now:
            queue.append(next_request)
            next_request += 1
        prefill = 0
        decoding = len(running)
        while queue and len(running) < slots and prefill + prompt[queue[0]] <= 64_000:
            chosen = queue.pop(0)
            running.append(chosen)
            admitted[chosen] = now
            prefill += int(prompt[chosen])
        duration = 15_000_000 + 150_000 * len(running) + prefill * 9_000
        full = min(len(running), 5) if offloads else len(running)
        mixed = min(len(running) - full, 12)
        hot = (len(running) - full) * 1_100
        index = min(sum(int(prompt[r]) // 64 + 1 for r in running), 20_000)
        pinned = len(running) * 40 + full * 4_000 if offloads else min(len(running) * 12_000, 60_000)
        released = min(mixed * 1_000, NUM_GPU_BLOCKS - hot - index - pinned) if offloads else 0
        row = {
            "start_ns": now,
            "duration_ns": duration,
            "num_decodes": decoding,
            "decode_tokens": decoding,
            "prefill_tokens": prefill,
            "running": len(running),
            "waiting": len(queue),
            "num_full": full,
            "num_mixed": mixed,
            "num_none": len(running) - full - mixed,
            "free_blocks": NUM_GPU_BLOCKS - hot - index - pinned,
            "index_blocks": index,
            "resident_pinned_blocks": pinned,
            "resident_released_blocks": released,
            "hot_blocks": hot,
            "cached_free_blocks": released // 2,
            "host_blocks_used": index if offloads else 0,
            "h2d_bytes": (len(running) - full) * 4_000_000 if offloads else 0,
            "d2h_bytes": (prefill + decoding) * 51_168 // 8 if offloads else 0,
            "missed_millirows": (len(running) - full) * 6_000_000 if offloads else 0,
            "preemptions": 0,
            "cost_launch_ns": 4_000_000,
            "cost_attention_ns": 3_000_000 + 50_000 * len(running),
            "cost_moe_ns": 8_000_000 + 100_000 * len(running),
            "cost_prefill_ns": prefill * 9_000,
        }
        rows.append(row)
        now += duration
        for chosen in list(running):
            if first[chosen] < 0:
                first[chosen] = now
            else:
                gap = now - int(last_token[chosen])
                gaps[gap] = gaps.get(gap, 0) + 1
            last_token[chosen] = now
            produced[chosen] += 1
            if produced[chosen] == output[chosen]:
                finish[chosen] = now
                running.remove(chosen)
    steps = {name: np.array([row[name] for row in rows], np.int64) for name in rows[0]}
    misses = int(steps["missed_millirows"].sum()) // 1000
    kept = int(steps["decode_tokens"].sum()) * 78 * 2048
    summary = {
        "offered_load": 1.8 if slots < 20 else 0.7,
        "bound_by": "gpu_blocks" if slots < 20 else "arrivals",
        "num_gpu_blocks": NUM_GPU_BLOCKS,
        "gpu_block_bytes": 209_920,
        "num_host_blocks": NUM_HOST_BLOCKS if offloads else 0,
        "num_preemptions": 0,
        "h2d_bytes": int(steps["h2d_bytes"].sum()),
        "d2h_bytes": int(steps["d2h_bytes"].sum()),
        "missed_rows": misses if offloads else 0,
        "hot_hit_rows": 12 * misses if offloads else 0,
        "resident_rows": max(kept - 13 * misses, 0) if offloads else kept,
        "num_steps": len(rows),
        "num_events": len(rows) + num_requests,
        "h2d_bytes_per_s": 55e9,
        "d2h_bytes_per_s": 55e9,
        "node_memory": "reported",
        "num_gpus": 8,
    }
    scenario = {**SCENARIO, "policy": {"name": policy}, "slo": slo or {}, "seed": seed}
    scenario["workload"] = {"time_scale": 1.0, "warmup_s": warmup_s}
    return RunResult(
        policy=policy,
        scenario=scenario,
        trace={
            "name": "toy",
            "format": "synthetic",
            "sha256": "0" * 64,
            "num_requests": num_requests,
            "sum_input_tokens": int(prompt.sum()),
            "sum_output_tokens": int(output.sum()),
            "span_s": float(arrival[-1]) / 1e9,
        },
        wall_s=0.25,
        summary=summary,
        requests={
            "request_id": np.arange(num_requests),
            "session": np.full(num_requests, -1),
            "turn": np.zeros(num_requests, np.int64),
            "arrival_ns": arrival,
            "admitted_ns": admitted,
            "first_token_ns": first,
            "finish_ns": finish,
            "prompt_tokens": prompt,
            "output_tokens": produced,
            "declared_output_tokens": output,
            "hit_tokens": np.zeros(num_requests, np.int64),
            "num_preemptions": np.zeros(num_requests, np.int64),
            "status": np.full(num_requests, int(RequestStatus.FINISHED), np.int8),
        },
        steps=steps,
        itl=(np.array(sorted(gaps), np.int64), np.array([gaps[g] for g in sorted(gaps)], np.int64)),
    )
