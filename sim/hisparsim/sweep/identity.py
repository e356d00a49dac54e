"""Which scenarios are the same run: the fingerprint of everything that a simulation depends on.

Settings that a policy never sees do not count. What it sees of the pools is what the serving core is handed
(:class:`hisparsim.serving.limits.ServingLimits`): a policy without layer groups gets neither hot rows nor a
host pool, so ``kv.hot_rows`` and ``kv.host_pool_gib`` do not tell its runs apart. The ordinary offload tier
is handed to all; the policies of ``_WITHOUT_OFFLOAD_TIER`` never read it (a test reads their sources), any
other policy, a user's own above all, is taken to. A seed counts where something is drawn: Poisson arrivals or
drafts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hisparsim import __version__
from hisparsim.des.simulate import limits_of
from hisparsim.serving.policies import policy_class
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind
from hisparsim_traces import Trace

_POOL_KEYS = ("hot_rows", "host_pool_gib", "prefix_offload_gib")
_WITHOUT_OFFLOAD_TIER = frozenset({"gpu-only", "hybrid", "host-resident", "never-admit", "thrash"})


def reads_offload_tier(policy: str) -> bool:
    """Query: whether ``kv.prefix_offload_gib`` can change what a policy does."""
    return policy not in _WITHOUT_OFFLOAD_TIER


def reads_host_pool(policy: str) -> bool:
    """Query: whether ``kv.hot_rows`` and ``kv.host_pool_gib`` can change what a policy does."""
    return policy_class(policy).uses_groups


def host_memory_gib(scenario: Scenario) -> float:
    """Query: pinned host memory that the scenario's policy uses, all replicas, GiB."""
    name = scenario.policy.name
    pool = scenario.host_pool_gib if reads_host_pool(name) else 0.0
    tier = scenario.prefix_offload_gib if reads_offload_tier(name) and not reads_host_pool(name) else 0.0
    return (pool + tier) * scenario.parallel.dp


def draws_at_random(scenario: Scenario) -> bool:
    """Query: whether the seed can change a run."""
    redrawn = scenario.workload.rate_per_s is not None and scenario.workload.concurrency is None
    return redrawn or scenario.speculation.draft_tokens > 0


def fingerprint(scenario: Scenario, trace: Trace) -> str:
    """Query: 32 hex digits, equal for scenarios whose runs are equal, different otherwise.

    Raises:
        ScenarioError, PoolTooSmallError, PolicyError: the scenario cannot be run.
    """
    kind = policy_class(scenario.policy.name)
    values = scenario.model_dump(mode="json")
    for key in _POOL_KEYS:
        del values["kv"][key]
    if not draws_at_random(scenario):
        del values["seed"]
    limits = dataclasses.asdict(
        limits_of(scenario.setup(PoolKind.PACKED if kind.uses_groups else PoolKind.WHOLE))
    )
    if not reads_offload_tier(scenario.policy.name):
        del limits["offload_blocks"]
    told: Mapping[str, Any] = {
        "scenario": values,
        "limits": limits,
        "presets": [repr(scenario.model_spec), repr(scenario.node_spec), _profile_bytes(scenario)],
        "trace": [trace.sha256, trace.num_requests],
        "policy": _source_sha256(kind),
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _profile_bytes(scenario: Scenario) -> str:
    path = Path(scenario.locality.profile)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@lru_cache(maxsize=64)
def _source_sha256(kind: type[ResidencyPolicy]) -> str:
    """Query: of the files that define a policy class and the classes it is built on."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if issubclass(base, ResidencyPolicy):
            file = Path(inspect.getfile(base))
            if file.suffix != ".py":  # compiled, with its source beside it
                file = file.with_name(file.name.split(".")[0] + ".py")
            digest.update(file.read_bytes())
    return digest.hexdigest()
