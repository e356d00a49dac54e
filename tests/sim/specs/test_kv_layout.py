"""Row formats, packing into groups and blocks, host strides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.specs.kv_layout import (
    PAGE_TOKENS,
    RowFormat,
    auto_row_format,
    kv_layout,
    pages_of,
    row_bytes,
)
from hisparsim.specs.models import ModelSpec, load_model
from hisparsim.specs.nodes import Architecture


@pytest.mark.parametrize(
    ("row_format", "size"),
    [(RowFormat.FP8, 576), (RowFormat.FP8_DS_MLA, 656), (RowFormat.BF16, 1152), (RowFormat.NVFP4, 352)],
)
@pytest.mark.parametrize("name", ["glm-5.3", "deepseek-v3.2", "tiny-dsa"])
def test_a_row_has_its_published_size(name: str, row_format: RowFormat, size: int) -> None:
    assert row_bytes(load_model(name), row_format) == size


@pytest.mark.parametrize(
    (
        "row_format",
        "with_mtp",
        "indexer_page",
        "groups",
        "gpu_block",
        "baseline_block",
        "resident",
        "baseline",
    ),
    [
        (RowFormat.FP8, False, 177_408, 20, 184_320, 3_052_800, 60_480, 47_700),
        (RowFormat.FP8, True, 185_856, 20, 221_184, 3_098_112, 72_576, 48_408),
        (RowFormat.FP8_DS_MLA, False, 177_408, 20, 209_920, 3_452_160, 68_880, 53_940),
        (RowFormat.FP8_DS_MLA, True, 185_856, 21, 209_920, 3_502_592, 72_160, 54_728),
        (RowFormat.BF16, False, 177_408, 20, 294_912, 5_928_192, 96_768, 92_628),
    ],
)
def test_glm_53_packs_as_vllm_033_does(
    row_format: RowFormat,
    with_mtp: bool,
    indexer_page: int,
    groups: int,
    gpu_block: int,
    baseline_block: int,
    resident: int,
    baseline: int,
) -> None:
    layout = kv_layout(load_model("glm-5.3"), row_format, with_mtp=with_mtp)
    assert layout.indexer_page_bytes == indexer_page
    assert layout.num_groups == groups
    assert layout.gpu_block_bytes == gpu_block
    assert layout.baseline_block_bytes == baseline_block
    assert layout.resident_bytes_per_token == resident
    assert layout.baseline_bytes_per_token == baseline


def test_the_first_group_has_two_layers_and_the_others_four() -> None:
    layout = kv_layout(load_model("glm-5.3"), RowFormat.FP8_DS_MLA)
    assert layout.group_num_layers == (2, *[4] * 19)


def test_the_mtp_layer_joins_the_last_group_where_it_fits_and_is_alone_where_not() -> None:
    model = load_model("glm-5.3")
    assert kv_layout(model, RowFormat.FP8, with_mtp=True).group_num_layers[-1] == 5
    assert kv_layout(model, RowFormat.FP8_DS_MLA, with_mtp=True).group_num_layers[-1] == 1


@pytest.mark.parametrize(
    ("row_format", "with_mtp", "block", "stride"),
    [
        (RowFormat.FP8_DS_MLA, False, 3_274_752, 3_276_800),
        (RowFormat.FP8_DS_MLA, True, 3_316_736, 3_317_760),
        (RowFormat.FP8, False, 2_875_392, 2_875_392),
        (RowFormat.BF16, False, 5_750_784, 5_750_784),
    ],
)
def test_a_host_stride_is_whole_4_kib_pages_where_ranks_share_the_pool(
    row_format: RowFormat, with_mtp: bool, block: int, stride: int
) -> None:
    layout = kv_layout(load_model("glm-5.3"), row_format, with_mtp=with_mtp)
    assert layout.host_block_bytes == block
    assert layout.host_block_stride_bytes(shared_by_ranks=True) == stride
    assert layout.host_block_stride_bytes(shared_by_ranks=False) == block


@pytest.mark.parametrize(
    ("architecture", "row_format"),
    [
        (Architecture.HOPPER, RowFormat.FP8_DS_MLA),
        (Architecture.BLACKWELL, RowFormat.FP8),
        (Architecture.BLACKWELL_ULTRA, RowFormat.FP8),
        (Architecture.BLACKWELL_RTX, RowFormat.FP8_DS_MLA),
    ],
)
def test_auto_follows_the_architecture(architecture: Architecture, row_format: RowFormat) -> None:
    assert auto_row_format(architecture) is row_format


def _naive_groups(model: ModelSpec, page: int, indexer_page: int, with_mtp: bool) -> list[list[int]]:
    """The packing rule over single layers: a layer without an indexer never leaves its owner."""
    num_layers = model.num_kv_layers(with_mtp=with_mtp)
    groups: list[list[int]] = []
    layer = 0
    while layer < num_layers:
        end = layer + 1
        while end < num_layers and not model.owns_indexer(end):
            end += 1
        unit = list(range(layer, end))
        if groups and page * len(groups[-1] + unit) <= indexer_page:
            groups[-1].extend(unit)
        else:
            groups.append(unit)
        layer = end
    return groups


@given(
    num_layers=st.integers(1, 90),
    freq=st.integers(1, 8),
    offset=st.integers(1, 6),
    index_head_dim=st.sampled_from([64, 128, 256]),
    row_format=st.sampled_from(list(RowFormat)),
    with_mtp=st.booleans(),
)
def test_any_geometry_packs_whole_units_in_order_into_blocks_that_hold_every_page(
    num_layers: int, freq: int, offset: int, index_head_dim: int, row_format: RowFormat, with_mtp: bool
) -> None:
    model = load_model("glm-5.3").model_copy(
        update={
            "num_layers": num_layers,
            "index_topk_freq": freq,
            "index_skip_topk_offset": offset,
            "index_head_dim": index_head_dim,
        }
    )
    layout = kv_layout(model, row_format, with_mtp=with_mtp)
    page = PAGE_TOKENS * row_bytes(model, row_format)
    assert [list(g) for g in layout.groups] == _naive_groups(model, page, layout.indexer_page_bytes, with_mtp)
    assert sum(layout.group_num_layers) == layout.num_layers
    assert layout.gpu_block_bytes % layout.layer_page_bytes == 0
    assert layout.gpu_block_bytes >= layout.indexer_page_bytes
    assert all(layout.gpu_block_bytes >= n * layout.layer_page_bytes for n in layout.group_num_layers)
    assert layout.gpu_block_bytes - layout.layer_page_bytes < max(
        layout.indexer_page_bytes, max(layout.group_num_layers) * layout.layer_page_bytes
    )


@given(st.integers(0, 10_000_000))
def test_pages_hold_all_tokens_and_no_page_is_spare(tokens: int) -> None:
    assert PAGE_TOKENS * pages_of(tokens) >= tokens > PAGE_TOKENS * (pages_of(tokens) - 1)
