"""From a finished run to its record: requests, steps, and what bound it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.link_rates import link_rates
from hisparsim.cost.load import StepLoad
from hisparsim.des.gang import STEP_TABLE_COLUMNS, Gang
from hisparsim.des.world import World
from hisparsim.results.records import RequestStatus, RunResult
from hisparsim.serving.plan import graph_bucket
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind, ServingSetup
from hisparsim_traces import Trace

NS_PER_S = 1e9
QUIET_SHARE = 0.05
"""Work waiting for less of the busy time than this: the arrivals bind, not the engine."""
PCIE_SHARE = 0.4
"""Exposed transfers beyond this share of the step time: the links bind."""
_FLOW_COLUMNS = (
    "num_decodes",
    "decode_tokens",
    "prefill_tokens",
    "h2d_bytes",
    "d2h_bytes",
    "missed_millirows",
)


def run_result(
    scenario: Scenario, setup: ServingSetup, trace: Trace, world: World, gangs: list[Gang], wall_s: float
) -> RunResult:
    """The record of a finished run."""
    steps = merge_steps([gang.steps.as_columns() for gang in gangs])
    requests = _requests(trace, world)
    return RunResult(
        policy=scenario.policy.name,
        scenario=scenario.model_dump(mode="json"),
        trace=trace_summary(trace),
        wall_s=wall_s,
        summary=_summary(scenario, setup, world, gangs, requests, steps),
        requests=requests,
        steps=steps,
        itl=world.clock.gap_weights(),
    )


def merge_steps(tables: list[dict[str, NDArray[np.int64]]]) -> dict[str, NDArray[np.int64]]:
    """One timeline of replicas that step on their own: each row starts when any of them starts a step.

    Counts of state are summed over the replicas' latest steps; what a step moves or costs stays its own, and
    ``duration_ns`` runs to the next row.
    """
    if len(tables) == 1:
        return tables[0]
    order = np.argsort(np.concatenate([table["start_ns"] for table in tables]), kind="stable")
    owner = np.concatenate([np.full(len(t["start_ns"]), n) for n, t in enumerate(tables)])[order]
    merged: dict[str, NDArray[np.int64]] = {}
    for name in STEP_TABLE_COLUMNS:
        column = np.concatenate([table[name] for table in tables])[order]
        if name in _FLOW_COLUMNS or name in ("start_ns", "duration_ns") or name.startswith("cost_"):
            merged[name] = column
            continue
        total = np.zeros(len(order), np.int64)
        for number in range(len(tables)):
            mine = owner == number
            latest = np.maximum.accumulate(np.where(mine, np.arange(len(order)), -1))
            total += np.where(latest >= 0, column[np.maximum(latest, 0)], 0)
        merged[name] = total
    if len(order):
        ends = np.append(merged["start_ns"][1:], merged["start_ns"][-1] + merged["duration_ns"][-1])
        merged["duration_ns"] = ends - merged["start_ns"]
    return merged


def _requests(trace: Trace, world: World) -> dict[str, NDArray[np.int64]]:
    clock, arrivals = world.clock, world.arrivals
    return {
        "request_id": np.arange(trace.num_requests, dtype=np.int64),
        "session": trace.session.astype(np.int64),
        "turn": trace.turn.astype(np.int64),
        "arrival_ns": np.array(arrivals.arrival_ns, np.int64),
        "admitted_ns": clock.admitted_ns,
        "first_token_ns": clock.first_token_ns,
        "finish_ns": clock.finish_ns,
        "prompt_tokens": np.array(arrivals.prompt_tokens, np.int64),
        "output_tokens": clock.output_tokens,
        "declared_output_tokens": trace.output_tokens.astype(np.int64),
        "hit_tokens": clock.hit_tokens,
        "num_preemptions": clock.num_preemptions,
        "status": np.array([int(status) for status in arrivals.status], np.int8),
    }


def _summary(
    scenario: Scenario,
    setup: ServingSetup,
    world: World,
    gangs: list[Gang],
    requests: dict[str, NDArray[np.int64]],
    steps: dict[str, NDArray[np.int64]],
) -> dict[str, Any]:
    busy_ns = int(steps["duration_ns"].sum())
    blocked = {reason: ns / max(busy_ns, 1) for reason, ns in sorted(world.blocked_ns.items())}
    rows = [replica.rows for replica in world.replicas]
    layers = setup.num_layers / 1000
    missed, looked_up = sum(r.missed for r in rows), sum(r.looked_up for r in rows)
    selected = sum(r.selected for r in rows)
    moved = [replica.total_bytes() for replica in world.replicas]
    counts = world.arrivals.counts
    cores = [replica.core for replica in world.replicas]
    rates = link_rates(scenario)
    notes = []
    if counts.first_rejection is not None:
        notes.append(f"{counts.rejected} requests were rejected; the first: {counts.first_rejection}")
    return {
        "offered_load": offered_load(scenario, setup, world, requests, steps),
        "bound_by": bound_by(blocked, steps, busy_ns),
        "blocked_share": blocked,
        "num_gpu_blocks": setup.num_gpu_blocks,
        "gpu_block_bytes": setup.gpu_block_bytes,
        "num_host_blocks": setup.num_host_blocks if setup.pool is PoolKind.PACKED else 0,
        "host_block_bytes": setup.host_block_bytes,
        "num_preemptions": sum(core.num_preemptions for core in cores),
        "num_stall_steps": world.num_stall_steps,
        "prefix_hit_tokens": sum(core.prefix_hit_tokens for core in cores),
        "h2d_bytes": max(h2d for h2d, _ in moved),
        "d2h_bytes": max(d2h for _, d2h in moved),
        "missed_rows": missed * layers,
        "hot_hit_rows": (looked_up - missed) * layers,
        "resident_rows": (selected - looked_up) * layers,
        "tokens_truncated": counts.tokens_truncated,
        "tokens_discarded": sum(core.discarded_tokens for core in cores),
        "num_steps": len(steps["start_ns"]),
        "num_events": sum(gang.num_events for gang in gangs),
        "node_memory": scenario.node.memory.value,
        "num_gpus": setup.tp * setup.dp,
        "h2d_bytes_per_s": rates.h2d if math.isfinite(rates.h2d) else None,
        "d2h_bytes_per_s": rates.d2h if math.isfinite(rates.d2h) else None,
        "notes": notes,
    }


def bound_by(blocked: dict[str, float], steps: dict[str, NDArray[np.int64]], busy_ns: int) -> str:
    """What kept the run from going faster: gpu_blocks, host_blocks, pcie, compute or arrivals."""
    exposed = sum(int(steps[f"cost_{term}_ns"].sum()) for term in ("hot_gather", "staging", "mirror"))
    if exposed > PCIE_SHARE * max(busy_ns, 1):
        return "pcie"
    waiting = {
        "gpu_blocks": blocked.get("gpu_blocks", 0.0),
        "host_blocks": blocked.get("host_blocks", 0.0),
        "pcie": blocked.get("loading", 0.0),
        "compute": blocked.get("token_budget", 0.0) + blocked.get("max_num_seqs", 0.0),
    }
    reason = max(waiting, key=lambda name: waiting[name])
    return reason if sum(waiting.values()) > QUIET_SHARE else "arrivals"


def offered_load(
    scenario: Scenario,
    setup: ServingSetup,
    world: World,
    requests: dict[str, NDArray[np.int64]],
    steps: dict[str, NDArray[np.int64]],
) -> float | None:
    """Offered over sustainable tokens: the arrival rate against what full batches would serve.

    Sustainable: requests of the mean size, as many at a time as the pools hold, decode at that batch's step
    time and take their prefill's time from everybody. None where arrivals wait for answers (a closed loop,
    turns of a conversation): there the engine's own speed sets the rate.
    """
    served = requests["status"] == int(RequestStatus.FINISHED)
    waits = scenario.workload.concurrency is not None or bool((world.arrivals.trace.parent >= 0).any())
    if waits or np.count_nonzero(served) < 2:
        return None
    arrival = requests["arrival_ns"][requests["arrival_ns"] >= 0]
    span_s = float(arrival.max() - arrival.min()) / NS_PER_S
    if span_s <= 0:
        return None
    prompt = requests["prompt_tokens"][served]
    output = requests["declared_output_tokens"][served]
    computed = int((prompt - requests["hit_tokens"][served]).sum())
    context = int((prompt + output / 2).mean())
    batch = concurrency_limit(setup, world, int(prompt.mean() + output.mean()))
    decode = StepLoad(
        num_decodes=batch,
        graph_requests=graph_bucket(batch),
        hot_rows=setup.hot_rows,
        resolve=setup.pool is PoolKind.PACKED,
        sum_context_tokens=batch * context,
        max_context_tokens=context,
        selected_rows=batch * min(context, setup.top_k),
    )
    replica = world.replicas[0]
    chunk = min(setup.max_num_batched_tokens, max(computed // max(len(prompt), 1), 1) * 8)
    prefill = StepLoad(
        num_prefills=max(1, chunk * len(prompt) // max(computed, 1)),
        prefill_tokens=chunk,
        prefill_past_tokens=chunk * context // 2,
        prefill_selected_rows=chunk * min(context, setup.top_k),
        resolve=setup.pool is PoolKind.PACKED,
    )
    prefill_s = float(replica.cost.price(prefill).total_ns) / NS_PER_S / chunk * computed
    tokens_a_step = 1 + scenario.speculation.acceptance * scenario.speculation.draft_tokens
    decode_s = (
        float(replica.cost.price(decode).total_ns) / NS_PER_S / batch * int(output.sum()) / tokens_a_step
    )
    return (prefill_s + decode_s) / setup.dp / span_s


def concurrency_limit(setup: ServingSetup, world: World, tokens: int) -> int:
    """Requests of so many tokens that the pools hold at a time, at most max_num_seqs."""
    limit = setup.num_usable_gpu_blocks // max(setup.steady_blocks(tokens), 1)
    if setup.pool is PoolKind.PACKED:
        pages = -(-tokens // setup.page_tokens)
        limit = min(
            max(limit, setup.num_usable_gpu_blocks // (setup.blocks_per_full_page * pages)),
            setup.num_usable_host_blocks // pages,
        )
    return max(min(limit, setup.max_num_seqs), 1)


def trace_summary(trace: Trace) -> dict[str, Any]:
    """What a run says of its trace, JSON-able."""
    known = trace.arrival_s[~np.isnan(trace.arrival_s)]
    return {
        "name": trace.name,
        "format": trace.format,
        "sha256": trace.sha256,
        "num_requests": trace.num_requests,
        "sum_input_tokens": trace.sum_input_tokens,
        "sum_output_tokens": trace.sum_output_tokens,
        "span_s": trace.span_s,
        "num_stamped": len(known),
    }
