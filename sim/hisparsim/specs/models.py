"""A sparse-MLA model's geometry: layers, who owns an indexer, MLA, experts.

Everything that depends on the model (KV bytes, groups, weights, FLOPs) is computed from these fields.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.presets import PresetKind, load_preset, preset_names

Count = Annotated[int, Field(ge=1)]


class ModelSpec(BaseModel):
    """Geometry of one model. Sizes are numbers of elements; the sources stand in the preset file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_layers: Count
    num_mtp_layers: Annotated[int, Field(ge=0, le=1)]
    hidden_size: Count
    num_heads: Count
    q_lora_rank: Count
    kv_lora_rank: Count
    qk_rope_head_dim: Count
    qk_nope_head_dim: Count
    v_head_dim: Count
    index_top_k: Count
    index_num_heads: Count
    index_head_dim: Count
    index_topk_freq: Count
    index_skip_topk_offset: Annotated[int, Field(ge=0)]
    num_routed_experts: Count
    num_experts_per_token: Count
    num_shared_experts: Annotated[int, Field(ge=0)]
    moe_intermediate_size: Count
    num_dense_layers: Annotated[int, Field(ge=0)]
    dense_intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count

    @property
    def latent_size(self) -> int:
        """Elements of one latent KV row: the compressed part and the shared rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """MoE layers among the main layers (the MTP layer not counted)."""
        return self.num_layers - self.num_dense_layers

    def owns_indexer(self, layer: int) -> bool:
        """Query: whether `layer` computes its own top-k; the others reuse the one of the layer before.

        IndexShare: a layer owns an indexer where max(layer - offset + 1, 0) is a multiple of the frequency
        (vLLM 0.33, glm_moe_dsa: frequency 4 and offset 3 give 0, 1, 2, 6, 10, ...). The MTP layer, which
        comes after the main ones, always owns one.
        """
        if layer >= self.num_layers:
            return True
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    @cached_property
    def indexer_layers(self) -> tuple[int, ...]:
        """The main layers that own an indexer, ascending."""
        return tuple(layer for layer in range(self.num_layers) if self.owns_indexer(layer))

    @property
    def num_indexers(self) -> int:
        """Main layers that own an indexer."""
        return len(self.indexer_layers)

    def num_kv_layers(self, *, with_mtp: bool) -> int:
        """Query: layers that store KV, with or without the MTP layer."""
        return self.num_layers + (self.num_mtp_layers if with_mtp else 0)

    def index_units(self, *, with_mtp: bool) -> tuple[tuple[int, ...], ...]:
        """Query: the layers by IndexShare unit: each owner followed by the layers that reuse its top-k."""
        units: list[list[int]] = []
        for layer in range(self.num_kv_layers(with_mtp=with_mtp)):
            if self.owns_indexer(layer):
                units.append([layer])
            else:
                units[-1].append(layer)
        return tuple(tuple(unit) for unit in units)


def model_names() -> tuple[str, ...]:
    """Query: the names of the bundled models."""
    return preset_names(PresetKind.MODEL)


def load_model(name: str) -> ModelSpec:
    """Query: the model preset called `name`, or the one in a file where `name` ends in `.toml`.

    Raises UnknownNameError (with the known names) or ScenarioError where the file is not a model.
    """
    preset = load_preset(PresetKind.MODEL, name)
    try:
        model = ModelSpec.model_validate(preset.values)
    except ValidationError as error:
        raise ScenarioError(preset_error("model", name, error)) from None
    if not model.owns_indexer(0):
        raise ScenarioError(
            f"model preset {name!r}: layer 0 must own an indexer, others reuse an earlier one"
        )
    return model


def preset_error(noun: str, name: str, error: ValidationError) -> str:
    """Query: one line for the first thing that is wrong in a preset file."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or noun
    return f"{noun} preset {name!r}: {where}: {first['msg'].lower()}"
