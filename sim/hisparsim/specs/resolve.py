"""A scenario with every value in force, and where each came from: what `hisparsim scenario show` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from hisparsim.specs.errors import PoolTooSmallError
from hisparsim.specs.presets import PresetKind, load_preset
from hisparsim.specs.scenario import (
    DEFAULT_HOST_POOL_GIB,
    DEFAULT_PREFIX_OFFLOAD_GIB,
    Origin,
    Scenario,
)
from hisparsim.specs.setup import PoolKind, ServingSetup, gpu_kv_gib
from hisparsim.specs.weights import GIB, weight_bytes


@dataclass(frozen=True)
class ResolvedValue:
    """One value in force; `source` says how it was derived, or where a preset's figure was published."""

    key: str
    value: Any
    origin: Origin
    source: str = ""


def resolve(scenario: Scenario) -> tuple[ResolvedValue, ...]:
    """Query: all keys of the file first, then the presets' figures, then what is derived from both."""
    return (*_keys(scenario), *_preset_values(scenario), *_derived(scenario))


def _keys(scenario: Scenario) -> Iterator[ResolvedValue]:
    filled = {
        "kv.hot_rows": _derived_value("kv.hot_rows", scenario.hot_rows, "(query_len + 1) x top_k"),
        "kv.host_pool_gib": _host_gib("kv.host_pool_gib", scenario.host_pool_gib, DEFAULT_HOST_POOL_GIB),
        "kv.prefix_offload_gib": _host_gib(
            "kv.prefix_offload_gib", scenario.prefix_offload_gib, DEFAULT_PREFIX_OFFLOAD_GIB
        ),
    }
    for key, value in _flatten(scenario.model_dump(mode="json")):
        if value is None and key in filled:
            yield filled[key]
        else:
            yield ResolvedValue(key, value, scenario.origin(key), _null_note(key) if value is None else "")


def _derived_value(key: str, figure: Any, source: str) -> ResolvedValue:
    return ResolvedValue(key, figure, Origin.DERIVED, source)


def _host_gib(key: str, gib: float, default_gib: float) -> ResolvedValue:
    if gib == default_gib:
        return ResolvedValue(key, gib, Origin.DEFAULT)
    return _derived_value(key, gib, f"{default_gib:g} GiB, but at most 95 % of the node's DRAM by replica")


def _null_note(key: str) -> str:
    if key.startswith("links."):
        return "null: the node preset's rate"
    if key in ("kv.gpu_kv_gib", "kv.num_gpu_blocks"):
        return "null: computed, see derived"
    return "null: not used"


def _preset_values(scenario: Scenario) -> Iterator[ResolvedValue]:
    specs: tuple[tuple[str, BaseModel, PresetKind, str], ...] = (
        ("model", scenario.model_spec, PresetKind.MODEL, scenario.model.preset),
        ("node", scenario.node_spec, PresetKind.NODE, scenario.node.preset),
    )
    for prefix, spec, kind, name in specs:
        sources = load_preset(kind, name).sources
        for key, value in _flatten(spec.model_dump(mode="json")):
            yield ResolvedValue(f"{prefix}.{key}", value, Origin.PRESET, sources.get(key, ""))


def _derived(scenario: Scenario) -> Iterator[ResolvedValue]:
    def value(key: str, figure: Any, source: str) -> ResolvedValue:
        return _derived_value(f"derived.{key}", figure, source)

    weights = weight_bytes(scenario.model_spec, scenario.model.weights)
    yield value("row_format", scenario.row_format.value, "kv.dtype, auto by architecture")
    yield value("query_len", scenario.query_len, "1 + draft tokens")
    yield value("weights_shared_gib", round(weights.shared / GIB, 3), "geometry and model.weights")
    yield value("weights_experts_gib", round(weights.experts / GIB, 3), "geometry and model.weights")
    if scenario.kv.num_gpu_blocks is None:
        source = (
            "kv.gpu_kv_gib"
            if scenario.kv.gpu_kv_gib is not None
            else f"{scenario.node.memory.value} memory x utilization - weights - reserve, rounded to 0.1"
        )
        yield value("gpu_kv_gib", gpu_kv_gib(scenario), source)
    packed, whole = _setups(scenario)
    any_setup = whole if packed is None else packed
    assert any_setup is not None
    yield value("row_bytes", any_setup.row_bytes, "geometry")
    yield value("num_kv_layers", any_setup.num_layers, "geometry; the MTP layer where drafts are on")
    yield value("num_indexers", any_setup.num_indexers, "IndexShare rule")
    if packed is not None:
        groups = list(packed.group_num_layers)
        yield value("group_num_layers", groups, "greedy packing of IndexShare units")
        yield value("packed.gpu_block_bytes", packed.gpu_block_bytes, "geometry")
        yield value("packed.num_gpu_blocks", packed.num_gpu_blocks, "KV bytes / block bytes")
        hot_blocks, cap = packed.hot_blocks_per_request, packed.admission_cap_pages
        yield value("packed.hot_blocks_per_request", hot_blocks, "groups x pages of hot rows")
        watermark = packed.transition_watermark_blocks
        yield value("packed.transition_watermark_blocks", watermark, "max(hot blocks, 10 %)")
        yield value("packed.admission_cap_pages", cap, "min(in flight, window) / 64")
    if whole is not None:
        yield value("whole.gpu_block_bytes", whole.gpu_block_bytes, "geometry")
        yield value("whole.num_gpu_blocks", whole.num_gpu_blocks, "KV bytes / block bytes")
    stride = any_setup.host_block_stride_bytes
    yield value("host_block_bytes", any_setup.host_block_bytes, "all layers of 64 tokens")
    yield value("host_block_stride_bytes", stride, "4 KiB multiple where ranks share")
    yield value("num_host_blocks", any_setup.num_host_blocks, "host pool / stride")
    yield value("num_prefix_offload_blocks", any_setup.num_prefix_offload_blocks, "tier / tp / whole block")


def _setups(scenario: Scenario) -> tuple[ServingSetup | None, ServingSetup | None]:
    """Query: (packed, whole) setups; only one of them where `kv.num_gpu_blocks` counts its blocks."""
    if scenario.kv.num_gpu_blocks is None:
        return scenario.setup(PoolKind.PACKED), scenario.setup(PoolKind.WHOLE)
    try:
        return scenario.setup(PoolKind.PACKED), None
    except PoolTooSmallError:
        return None, scenario.setup(PoolKind.WHOLE)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        plain = value.value if isinstance(value, Enum) else value
        if isinstance(plain, Mapping):
            yield from _flatten(plain, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain
