"""Put an executor together: from limits, a model and a policy to pools, weights and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hisparsim.locality.profile import LocalityProfile
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.policy import ResidencyPolicy
from hisparsim.specs.kv_layout import RowFormat
from hisparsim.specs.models import ModelSpec

from .clock import StepClock
from .content import Content
from .copies import CopyEngine
from .cpu_kernels import CpuKernels
from .devices import Device, KernelKind
from .errors import RealRunError
from .executor import Executor, Mirrors
from .geometry import geometry_of
from .hot import HotBuffers
from .model import Combine, Model, sum_of
from .options import RunOptions, SelectionMode
from .pools import Pools
from .recorded import RecordedSelections, SelectionRecorder
from .residency import Residency
from .selection import ProfileSelection
from .tables import BlockTables
from .weights import make_weights

if TYPE_CHECKING:
    from .device_decode import DeviceDecode

INVARIANT_SHARDS = 2
"""Shards of one rank under ``batch_invariant``, so that two ranks compute the very same partial sums."""


@dataclass(frozen=True)
class Blueprint:
    """What every rank of a run must know to build its executor."""

    model: ModelSpec
    """The slice that runs."""
    row_format: RowFormat
    limits: ServingLimits
    uses_groups: bool
    mirrors: Mirrors
    num_host_blocks: int
    with_mtp: bool
    seed: int
    profile: LocalityProfile | None
    """None = selections of the model itself."""
    record_selections: Path | None
    replay_selections: Path | None
    batch_invariant: bool
    keep_hidden: bool
    inline_copies: bool


def blueprint(
    model: ModelSpec,
    row_format: RowFormat,
    limits: ServingLimits,
    policy: ResidencyPolicy,
    profile: LocalityProfile,
    options: RunOptions,
    seed: int,
) -> Blueprint:
    """Query: the blueprint of a run under a policy.

    Raises:
        RealRunError: the policy does what a real run cannot.
    """
    if policy.option_values.get("indexer_offload"):
        raise RealRunError(
            "policy.indexer_offload: indexer pages are not offloaded in real runs; leave it off"
        )
    if policy.uses_groups:
        num_host_blocks = limits.num_host_blocks
    else:  # a whole-page policy with a host tier keeps a ledger called ``tier``
        num_host_blocks = limits.offload_blocks + 1 if hasattr(policy, "tier") else 0
    return Blueprint(
        model=model,
        row_format=row_format,
        limits=limits,
        uses_groups=policy.uses_groups,
        mirrors=Mirrors(policy.mirrors_prefill, policy.mirrors_decode),
        num_host_blocks=num_host_blocks,
        with_mtp=limits.draft_tokens > 0,
        seed=seed,
        profile=profile if options.selection is SelectionMode.PROFILE else None,
        record_selections=options.record_selections,
        replay_selections=options.replay_selections,
        batch_invariant=options.batch_invariant,
        keep_hidden=options.keep_hidden,
        inline_copies=options.inline_copies,
    )


def make_executor(
    plan: Blueprint,
    device: Device,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    combine: Combine = sum_of,
    shared_path: Path | None = None,
) -> Executor:
    """Change: one rank's executor, with its pools and weights allocated.

    Raises:
        RealRunError: the geometry has no kernels, or memory does not suffice.
    """
    geometry = geometry_of(plan.model, plan.row_format, packed=plan.uses_groups, with_mtp=plan.with_mtp)
    limits, model_spec = plan.limits, plan.model
    max_pages = limits.pages(limits.max_model_len + limits.draft_tokens) + 1
    pools = Pools.allocate(
        geometry,
        device,
        num_blocks=limits.num_blocks,
        num_host_blocks=plan.num_host_blocks,
        num_staging_blocks=max_pages if plan.uses_groups else 0,
        shared_path=shared_path,
    )
    num_shards = max(INVARIANT_SHARDS, num_ranks) if plan.batch_invariant else num_ranks
    per_rank = num_shards // num_ranks
    weights = make_weights(
        model_spec,
        with_mtp=plan.with_mtp,
        seed=plan.seed,
        num_shards=num_shards,
        own_shards=range(rank * per_rank, (rank + 1) * per_rank),
        device=device.torch_device,
        dtype=device.dtype,
    )
    kernels = _kernels(plan, device, pools)
    clock = StepClock(device)
    content = Content(model_spec.vocab_size, plan.seed)
    tables = BlockTables(packed=plan.uses_groups, num_groups=geometry.num_groups, max_pages=max_pages)
    hot = HotBuffers(max(limits.hot_rows, 1), max_pages * limits.page_tokens)
    process = None
    if plan.profile is not None:
        process = ProfileSelection(plan.profile, content, len(geometry.units), plan.seed)
    residency = Residency(geometry, tables, hot, limits.num_blocks)
    executor = Executor(
        Model(model_spec, weights, kernels, combine, clock),
        pools,
        residency,
        kernels,
        content,
        CopyEngine(device, inline=plan.inline_copies or rank > 0),
        clock,
        mirrors=plan.mirrors,
        writes_host=rank == 0,
        process=process,
        decoder=_decoder(plan, device, kernels, residency),
    )
    top_k, num_units = model_spec.index_top_k, len(geometry.units)
    if plan.record_selections is not None and rank == 0:
        executor.recorder = SelectionRecorder(
            plan.record_selections, top_k=top_k, num_units=num_units, model=model_spec.name
        )
    if plan.replay_selections is not None:
        executor.recorded = RecordedSelections(plan.replay_selections, top_k=top_k, num_units=num_units)
    if plan.keep_hidden:
        executor.hidden = {}
    return executor


def _kernels(plan: Blueprint, device: Device, pools: Pools) -> CpuKernels:
    if device.kernels is KernelKind.TRITON:
        from .triton_kernels import TritonKernels

        return TritonKernels(pools, plan.model.index_top_k, invariant=plan.batch_invariant)
    return CpuKernels(pools, plan.model.index_top_k, invariant=plan.batch_invariant)


def _decoder(
    plan: Blueprint, device: Device, kernels: CpuKernels, residency: Residency
) -> DeviceDecode | None:
    """Decodes on the device from end to end, where Triton's kernels run and no selection is recorded."""
    if device.kernels is not KernelKind.TRITON or plan.record_selections or plan.replay_selections:
        return None
    from .device_decode import DeviceDecode
    from .triton_kernels import TritonKernels

    assert isinstance(kernels, TritonKernels)
    query_len = 1 + plan.limits.draft_tokens
    return DeviceDecode(
        kernels,
        residency,
        max_requests=2 * plan.limits.max_num_seqs + 8,
        hot_rows=max(plan.limits.hot_rows, query_len * plan.model.index_top_k),
        query_len=query_len,
        num_host_blocks=plan.num_host_blocks,
    )
