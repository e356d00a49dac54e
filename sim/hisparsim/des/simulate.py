"""``simulate``: one scenario, one trace, one policy, from first arrival to last token."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import simpy

from hisparsim.cost.link_rates import link_rates
from hisparsim.cost.sources import cost_model
from hisparsim.des.arrivals import Arrivals
from hisparsim.des.gang import Gang
from hisparsim.des.hot_buffers import HotBuffers
from hisparsim.des.identity import PageIdentity
from hisparsim.des.links import HostLinks, TransferKind
from hisparsim.des.recorder import TokenClock
from hisparsim.des.replica import Replica
from hisparsim.des.transfers import TransferDesk
from hisparsim.des.world import World
from hisparsim.locality.profile import load_profile
from hisparsim.results.records import RunResult
from hisparsim.serving.core import ServingCore
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.policies import policy_class
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind, ServingSetup
from hisparsim_traces import Trace


def simulate(
    scenario: Scenario,
    trace: Trace,
    *,
    check: bool = False,
    step_by_step: bool = False,
    progress: Callable[[int], None] | None = None,
) -> RunResult:
    """Play a trace under the scenario's policy.

    Args:
        check: run the conservation laws at every step (slow).
        step_by_step: spend an event on every step; by default stretches of quiet steps take one. The results
            are equal.
        progress: called with the number of finished requests as it grows.

    Returns:
        One row a request, one row a step, and the scalars of the run.

    Raises:
        ScenarioError: the scenario cannot be timed.
        PolicyError: the policy is unknown or cannot work with it.
        Wedged: requests wait for memory that nothing will free.
        LawBroken: with ``check``, a conservation law does not hold.
    """
    workload = scenario.workload
    if workload.limit is not None:
        trace = trace.head(workload.limit)
    if workload.time_scale != 1.0:
        trace = trace.scaled(workload.time_scale)
    kind = policy_class(scenario.policy.name)
    setup = scenario.setup(PoolKind.PACKED if kind.uses_groups else PoolKind.WHOLE)
    world, gangs = _build(scenario, setup, trace, kind, check, step_by_step, progress)
    for gang in gangs:
        world.env.process(gang.serve())
    enabled = gc.isenabled()
    gc.disable()  # the loop makes no reference cycles; collections would only scan the trace again and again
    started = time.perf_counter()
    try:
        world.env.run()
    finally:
        wall_s = time.perf_counter() - started
        if enabled:
            gc.enable()
    from hisparsim.des.summary import run_result

    return run_result(scenario, setup, trace, world, gangs, wall_s)


def limits_of(setup: ServingSetup) -> ServingLimits:
    """The serving core's numbers of a setup."""
    packed = setup.pool is PoolKind.PACKED
    return ServingLimits(
        num_blocks=setup.num_gpu_blocks,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        page_tokens=setup.page_tokens,
        num_groups=setup.num_resident_groups if packed else 0,
        hot_pages=setup.hot_pages_per_group if packed else 0,
        hot_rows=setup.hot_rows,
        num_host_blocks=setup.num_host_blocks if packed else 0,
        block_bytes=setup.gpu_block_bytes,
        host_block_bytes=setup.host_block_bytes,
        async_depth=setup.async_depth,
        watermark=setup.scheduler_watermark,
        draft_tokens=setup.draft_tokens,
        prefix_caching=setup.prefix_caching,
        offload_blocks=setup.num_prefix_offload_blocks,
    )


def _build(
    scenario: Scenario,
    setup: ServingSetup,
    trace: Trace,
    kind: type[ResidencyPolicy],
    check: bool,
    step_by_step: bool,
    progress: Callable[[int], None] | None,
) -> tuple[World, list[Gang]]:
    env = simpy.Environment()
    cost = cost_model(scenario)
    rates = link_rates(scenario)
    links = HostLinks(env, rates)
    profile = load_profile(scenario.locality.profile, setup.top_k)
    limits = limits_of(setup)
    replicas = []
    for number in range(setup.dp):
        core = ServingCore(limits, kind(limits, **scenario.policy.options))
        link = links[number]
        desk = TransferDesk(env, link, core, TransferKind.WRITE_BACK)
        hot = HotBuffers(profile, trace.num_requests, starts_warm=kind.starts_warm)
        replicas.append(Replica(core, cost, hot, setup.top_k, link, desk))
    front_end = cost.front_end_ns if scenario.cost.front_end else None
    world = World(
        env=env,
        arrivals=Arrivals.of(trace, scenario, front_end),
        identity=PageIdentity(trace, setup.page_tokens),
        clock=TokenClock(trace.num_requests),
        replicas=replicas,
        links=links,
        seed=scenario.seed,
        draft_tokens=scenario.speculation.draft_tokens,
        acceptance=scenario.speculation.acceptance,
        check=check,
        step_by_step=step_by_step,
        progress=progress,
    )
    together = setup.ep and setup.dp > 1
    gangs = [Gang(world, replicas)] if together else [Gang(world, [replica]) for replica in replicas]
    return world, gangs
