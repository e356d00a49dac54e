"""Random small runs for property tests: a scenario of the tiny model, a trace, and how to compare results.

The model is `tiny-dsa` with pools of a few requests, links slow enough that transfers outlive steps, and
prompts of a few pages, so that a short run meets waiting, preemption, eviction and idle times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hisparsim.results.records import RunResult
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind
from hisparsim.specs.weights import GIB
from hisparsim_traces import Trace
from hisparsim_traces.synth.assemble import synthetic_trace

POLICIES = ("gpu-only", "prefix-offload", "host-resident", "hybrid", "thrash")
PAGE = 64
TINY = (
    "model.preset=tiny-dsa",
    "node.preset=h200x8",
    "parallel.tp=1",
    "scheduler.max_model_len=1600",
)


@cache
def base() -> Scenario:
    """The scenario that the random ones change."""
    return Scenario.load(overrides=TINY)


@cache
def host_page_gib() -> float:
    """GiB of one page in the host pool."""
    return base().setup(PoolKind.PACKED).host_block_stride_bytes / GIB


@cache
def whole_page_gib() -> float:
    """GiB of one page in the GPU pool of gpu-only, and in the offload tier."""
    return base().setup(PoolKind.WHOLE).gpu_block_bytes / GIB


def tiny(*overrides: str) -> Scenario:
    """The tiny scenario with overrides."""
    return base().with_overrides(overrides)


@st.composite
def scenarios(draw: st.DrawFn, policies: Sequence[str] = POLICIES, max_draft_tokens: int = 2) -> Scenario:
    """Scenarios with pools from a single request's need upwards."""
    policy = draw(st.sampled_from(policies))
    drafts = draw(st.integers(0, max_draft_tokens))
    sequences = draw(st.integers(1, 10))
    tokens = draw(st.sampled_from([64, 200, 512, 2048]))
    pages = draw(st.integers(16, 120))
    values: dict[str, Any] = {
        "policy.name": policy,
        "speculation.draft_tokens": drafts,
        "speculation.acceptance": draw(st.sampled_from([0.0, 0.6, 1.0])),
        "scheduler.async_depth": draw(st.sampled_from([1, 2])),
        "scheduler.max_num_seqs": sequences,
        "scheduler.max_num_batched_tokens": max(tokens, sequences * (1 + drafts)),
        "scheduler.watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "kv.num_gpu_blocks": pages if policy in ("gpu-only", "prefix-offload", "thrash") else 5 * pages,
        "kv.hot_rows": (1 + drafts) * 128 + draw(st.sampled_from([0, 64, 200])),
        "kv.host_pool_gib": f"{draw(st.integers(30, 200)) * host_page_gib() * 1.001:.9f}",
        "kv.prefix_offload_gib": f"{draw(st.integers(4, 60)) * whole_page_gib() * 1.001:.9f}",
        "kv.prefix_caching": draw(st.booleans()),
        "links.h2d_gb_per_s": draw(st.sampled_from(["inf", 1.0, 0.05])),
        "links.d2h_gb_per_s": draw(st.sampled_from(["inf", 1.0, 0.05])),
        "cost.front_end": draw(st.booleans()),
        "workload.over_length": draw(st.sampled_from(["reject", "skip", "truncate"])),
        "workload.concurrency": draw(st.sampled_from(["null", "null", 1, 4])),
        "workload.rate_per_s": draw(st.sampled_from(["null", "null", 50.0])),
        "seed": draw(st.integers(0, 5)),
    }
    replicas = draw(st.sampled_from([1, 1, 1, 2]))
    values["parallel.dp"] = replicas
    values["parallel.ep"] = replicas > 1 and draw(st.booleans())
    if policy == "hybrid":
        for switch in (
            "wait_for_write_back",
            "transition_on_watermark",
            "lease_next_step",
            "eager_host_mirror",
            "indexer_offload",
        ):
            values[f"policy.{switch}"] = str(draw(st.booleans())).lower()
    return base().with_overrides([f"{key}={value}" for key, value in values.items()])


@st.composite
def traces(draw: st.DrawFn, max_requests: int = 14) -> Trace:
    """Requests that arrive in batches: single ones, conversations and requests that share hash blocks."""
    num = draw(st.integers(1, max_requests))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    prompt = rng.integers(1, draw(st.sampled_from([70, 400, 1300])) + 1, num)
    output = rng.integers(1, draw(st.sampled_from([3, 90, 400])) + 1, num)
    arrival = np.sort(rng.choice([0.0, 0.02, 0.021, 0.2, 0.9], num))
    kind = draw(st.sampled_from(["single", "turns", "hashed"]))
    if kind == "single":
        return synthetic_trace("random", arrival, prompt, output)
    if kind == "hashed":
        return synthetic_trace("random", arrival, prompt, output, blocks=_blocks(rng, prompt))
    parent = np.full(num, -1, np.int64)
    turn = np.zeros(num, np.int64)
    session = np.arange(num)
    shared = np.zeros(num, np.int64)
    for row in range(1, num):
        if rng.random() < 0.6:
            before = int(rng.integers(0, row))
            parent[row], turn[row], session[row] = before, turn[before] + 1, session[before]
            context = int(prompt[before] + output[before])
            if rng.random() < 0.8 and context + 60 < 1500:
                prompt[row] = context + int(rng.integers(1, 60))
                shared[row] = context
    think = np.where(parent >= 0, rng.choice([0.0, 0.05, np.nan], num), np.nan)
    stamps = np.where((parent >= 0) & (rng.random(num) < 0.5), np.nan, arrival)
    return synthetic_trace(
        "random", stamps, prompt, output,
        session=session, turn=turn, parent=parent, think_s=think, shared_prefix_tokens=shared,
    )  # fmt: skip


def _blocks(rng: np.random.Generator, prompt: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Hash blocks of 16, 64 or 512 tokens: prompts extend one of three common prefixes."""
    size = int(rng.choice([16, 64, 512]))
    counts = -(-prompt // size)
    ids: list[int] = []
    fresh = 3_000
    for count in counts.tolist():
        common = int(rng.integers(0, count + 1))
        family = int(rng.integers(0, 3)) * 1_000
        ids += [family + index for index in range(common)]
        ids += range(fresh, fresh + count - common)
        fresh += count - common
    return size, np.concatenate([[0], np.cumsum(counts)]), np.array(ids, np.int64)


def difference(first: RunResult, second: RunResult, ignored: Sequence[str] = ("num_events",)) -> str | None:
    """The first place where two results differ, or None: every column, every gap, every scalar."""
    for table in ("requests", "steps"):
        mine, yours = getattr(first, table), getattr(second, table)
        for name, column in mine.items():
            if len(column) != len(yours[name]):
                return f"{table}: {len(column)} and {len(yours[name])} rows"
            if not np.array_equal(column, yours[name]):
                row = int(np.nonzero(column != yours[name])[0][0])
                return f"{table}.{name}[{row}]: {column[row]} and {yours[name][row]}"
    for mine_gaps, your_gaps in zip(first.itl, second.itl, strict=True):
        if not np.array_equal(mine_gaps, your_gaps):
            return "inter-token gaps differ"
    for name, value in first.summary.items():
        if name not in ignored and value != second.summary[name]:
            return f"summary.{name}: {value} and {second.summary[name]}"
    return None
