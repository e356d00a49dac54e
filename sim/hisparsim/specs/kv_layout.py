"""Bytes of the KV cache: row formats, pages, and how vLLM's hybrid memory allocator packs them into blocks.

A *row* is one token's latent KV in one layer, a *page* 64 consecutive tokens of one request.

| format | bytes of a GLM-5.3 row | parts |
|---|---|---|
| fp8 | 576 | 512 latent + 64 rope, one byte each |
| fp8_ds_mla | 656 | 512 latent in fp8, 4 fp32 scales (one per 128), 64 rope in bf16 |
| bf16 | 1152 | 576 elements of two bytes |
| nvfp4 | 352 | 256 latent in fp4, 32 fp8 scales (one per 16), 64 rope in fp8 (sum published, split assumed) |

With HiSparse one GPU pool of equal blocks serves all: a block holds an indexer page (all indexer layers), or
a resident page of one layer group, or a hot page of one layer group. Without it a block holds a page of all
layers and indexers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hisparsim.specs.models import ModelSpec
from hisparsim.specs.nodes import Architecture

PAGE_TOKENS = 64
HOST_STRIDE_ALIGN_BYTES = 4096
ROW_ALIGN_BYTES = 16
_SCALE_FP32_BYTES = 4


class RowFormat(Enum):
    """How one latent row is stored."""

    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"
    BF16 = "bf16"
    NVFP4 = "nvfp4"


def auto_row_format(architecture: Architecture) -> RowFormat:
    """Query: the fp8 format that vLLM's sparse MLA backend uses on an architecture.

    Hopper's FlashMLA kernels and the SM120 backend turn every fp8 cache into `fp8_ds_mla`; data-centre
    Blackwell stores plain fp8 (vLLM 0.33, mla_attention.py).
    """
    if architecture in (Architecture.BLACKWELL, Architecture.BLACKWELL_ULTRA):
        return RowFormat.FP8
    return RowFormat.FP8_DS_MLA


def row_bytes(model: ModelSpec, row_format: RowFormat) -> int:
    """Query: bytes of one row, a multiple of 16."""
    latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
    match row_format:
        case RowFormat.FP8:
            size = latent + rope
        case RowFormat.FP8_DS_MLA:
            size = latent + _SCALE_FP32_BYTES * (latent // 128) + 2 * rope
        case RowFormat.BF16:
            size = 2 * (latent + rope)
        case RowFormat.NVFP4:
            size = latent // 2 + latent // 16 + rope
    return _round_up(size, ROW_ALIGN_BYTES)


@dataclass(frozen=True)
class KvLayout:
    """The packed layout of one model, row format and choice of MTP layer. All sizes in bytes."""

    row_format: RowFormat
    row_bytes: int
    num_layers: int
    """Layers that store KV, the MTP layer among them where it is cached."""
    num_indexers: int
    index_row_bytes: int
    """One token in one indexer layer: fp8 key and one fp32 scale."""
    groups: tuple[tuple[int, ...], ...]
    """Layers that share a physical block, ascending."""

    @property
    def num_groups(self) -> int:
        """G: resident groups, and as many hot ones."""
        return len(self.groups)

    @property
    def group_num_layers(self) -> tuple[int, ...]:
        """Layers in each group."""
        return tuple(len(group) for group in self.groups)

    @property
    def layer_page_bytes(self) -> int:
        """One page of one layer."""
        return PAGE_TOKENS * self.row_bytes

    @property
    def indexer_page_bytes(self) -> int:
        """One page of all indexer layers."""
        return PAGE_TOKENS * self.num_indexers * self.index_row_bytes

    @property
    def gpu_block_bytes(self) -> int:
        """A block of the packed pool: an indexer page or the largest group page, in whole layer pages."""
        largest_group = max(self.group_num_layers) * self.layer_page_bytes
        return _round_up(max(self.indexer_page_bytes, largest_group), self.layer_page_bytes)

    @property
    def baseline_block_bytes(self) -> int:
        """A block without HiSparse: one page of all layers and all indexers."""
        return self.host_block_bytes + self.indexer_page_bytes

    @property
    def host_block_bytes(self) -> int:
        """One page of all layers (no indexer), as the host pool holds it."""
        return self.num_layers * self.layer_page_bytes

    def host_block_stride_bytes(self, *, shared_by_ranks: bool) -> int:
        """Query: distance between host blocks: whole 4 KiB pages where local ranks share one mapping."""
        if shared_by_ranks:
            return _round_up(self.host_block_bytes, HOST_STRIDE_ALIGN_BYTES)
        return self.host_block_bytes

    @property
    def resident_bytes_per_token(self) -> float:
        """GPU bytes of a fully resident token in the packed pool: 1 + G blocks a page."""
        return (1 + self.num_groups) * self.gpu_block_bytes / PAGE_TOKENS

    @property
    def baseline_bytes_per_token(self) -> float:
        """GPU bytes of a token without HiSparse."""
        return self.baseline_block_bytes / PAGE_TOKENS


def kv_layout(model: ModelSpec, row_format: RowFormat, *, with_mtp: bool = False) -> KvLayout:
    """Query: the layout of `model`, computed from its geometry.

    Groups start from the IndexShare units and take the next unit as long as the group's page stays within the
    indexer page; a unit is never split (vLLM 0.33, HiSparse layout).
    """
    index_row_bytes = model.index_head_dim + _SCALE_FP32_BYTES
    units = model.index_units(with_mtp=with_mtp)
    page = PAGE_TOKENS * row_bytes(model, row_format)
    indexer_page = PAGE_TOKENS * len(units) * index_row_bytes
    groups: list[tuple[int, ...]] = []
    for unit in units:
        if groups and (len(groups[-1]) + len(unit)) * page <= indexer_page:
            groups[-1] += unit
        else:
            groups.append(unit)
    return KvLayout(
        row_format=row_format,
        row_bytes=row_bytes(model, row_format),
        num_layers=model.num_kv_layers(with_mtp=with_mtp),
        num_indexers=len(units),
        index_row_bytes=index_row_bytes,
        groups=tuple(groups),
    )


def pages_of(tokens: int) -> int:
    """Query: pages that hold `tokens` tokens of one request."""
    return -(-tokens // PAGE_TOKENS)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
