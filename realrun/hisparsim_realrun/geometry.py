"""Where everything lies: layers, index units and layer groups of a model, and the bytes of a page.

A *unit* is a layer that owns an indexer and the layers that follow its selection; it never crosses a group.
With a packed pool (``uses_groups``) a GPU block holds the page of one group, or an indexer page; with a whole
pool it holds the page of all layers and behind it the indexer page. Blocks are rounded up to whole layer
pages, so that a row of any layer has a flat number: ``block * rows_per_block + row``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hisparsim.specs.kv_layout import PAGE_TOKENS, kv_layout
from hisparsim.specs.kv_layout import RowFormat as KvRowFormat
from hisparsim.specs.models import ModelSpec
from hisparsim.specs.scenario import Scenario
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.row_format import LATENT_COLUMNS, ROPE_COLUMNS, RowFormat

from .errors import RealRunError

INDEX_DIM = 128
INDEX_TOKEN_BYTES = 132
"""128 e4m3 codes and a float32 scale."""
INDEX_PAGE_BYTES = PAGE_TOKENS * INDEX_TOKEN_BYTES
"""One indexer's keys of one page."""


@dataclass(frozen=True)
class Unit:
    """An indexer and the layers that read by its selection."""

    index: int
    layers: tuple[int, ...]
    group: int
    first_in_group: int
    """Place of its first layer among the layers of its group."""


@dataclass(frozen=True)
class Geometry:
    """A model's pages as the pools hold them."""

    model: ModelSpec
    row_format: RowFormat
    packed: bool
    layout: PageLayout
    units: tuple[Unit, ...]
    unit_of_layer: tuple[int, ...]
    index_offset_bytes: int
    """Where the first indexer's keys begin in a block that holds them."""

    @property
    def num_layers(self) -> int:
        """Layers that store KV."""
        return len(self.unit_of_layer)

    @property
    def num_groups(self) -> int:
        return len(self.layout.group_layers)

    @property
    def rows_per_block(self) -> int:
        return self.layout.rows_per_block

    def layer_in_group(self, layer: int) -> int:
        unit = self.units[self.unit_of_layer[layer]]
        return unit.first_in_group + layer - unit.layers[0]

    def group_of(self, layer: int) -> int:
        return self.units[self.unit_of_layer[layer]].group


def geometry_of(
    model: ModelSpec, row_format: KvRowFormat, *, packed: bool, with_mtp: bool = False
) -> Geometry:
    """Query: the geometry of a model's KV.

    Raises:
        RealRunError: the kernels have no such row or index key.
    """
    if row_format.value not in {known.value for known in RowFormat}:
        raise RealRunError(
            f"kv.dtype = {row_format.value}: a real run stores rows as bf16 or fp8_ds_mla; set kv.dtype to "
            "one of them"
        )
    latent, rope, index = model.kv_lora_rank, model.qk_rope_head_dim, model.index_head_dim
    if (latent, rope, index) != (LATENT_COLUMNS, ROPE_COLUMNS, INDEX_DIM):
        raise RealRunError(
            f"{model.name} has rows of {latent} + {rope} and index keys of {index} elements; the kernels "
            f"serve {LATENT_COLUMNS} + {ROPE_COLUMNS} and {INDEX_DIM}"
        )
    kernels_format = RowFormat(row_format.value)
    row_bytes = kernels_format.row_bytes
    page_bytes = PAGE_TOKENS * row_bytes
    layout = kv_layout(model, row_format, with_mtp=with_mtp)
    groups = layout.groups if packed else (tuple(range(layout.num_layers)),)
    rows_bytes = layout.num_layers * page_bytes
    if packed:
        block_bytes, host_block_bytes, index_offset = layout.gpu_block_bytes, rows_bytes, 0
    else:
        index_pages = -(-layout.indexer_page_bytes // page_bytes)
        block_bytes = host_block_bytes = rows_bytes + index_pages * page_bytes
        index_offset = rows_bytes
    unit_layers = model.index_units(with_mtp=with_mtp)
    group_of = {layer: group for group, layers in enumerate(groups) for layer in layers}
    units = tuple(
        Unit(index, layers, group_of[layers[0]], layers[0] - groups[group_of[layers[0]]][0])
        for index, layers in enumerate(unit_layers)
    )
    return Geometry(
        model=model,
        row_format=kernels_format,
        packed=packed,
        layout=PageLayout(row_bytes, tuple(len(group) for group in groups), block_bytes, host_block_bytes),
        units=units,
        unit_of_layer=tuple(unit.index for unit in units for _ in unit.layers),
        index_offset_bytes=index_offset,
    )


def sliced(model: ModelSpec, num_layers: int | None, num_experts: int | None) -> ModelSpec:
    """Query: the first layers of a model with its first experts, everything else as it is.

    Raises:
        RealRunError: more than the model has, or fewer than one.
    """
    changes: dict[str, int] = {}
    for name, wanted in (("num_layers", num_layers), ("num_routed_experts", num_experts)):
        if wanted is None:
            continue
        has = int(getattr(model, name))
        if not 1 <= wanted <= has:
            raise RealRunError(f"a slice of {wanted} {name[4:]}: {model.name} has {has}; give 1 to {has}")
        changes[name] = wanted
    if num_layers is not None:
        changes["num_dense_layers"] = min(model.num_dense_layers, num_layers)
    if num_experts is not None:
        changes["num_experts_per_token"] = min(model.num_experts_per_token, num_experts)
    return model.model_copy(update=changes)


def sliced_scenario(
    scenario: Scenario, num_layers: int | None, num_experts: int | None, folder: Path
) -> Scenario:
    """Change: write the slice as a model preset into ``folder``; returns the scenario that uses it.

    So the simulator plays the very model that runs. Without a slice the scenario itself is returned.
    """
    if num_layers is None and num_experts is None:
        return scenario
    model = sliced(scenario.model_spec, num_layers, num_experts)
    path = folder / f"{model.name}-{model.num_layers}x{model.num_routed_experts}.toml"
    values = model.model_dump(exclude={"name"})
    lines = [f'{name} = {{ value = {value}, source = "slice" }}' for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return scenario.with_overrides([f"model.preset={path}"])
