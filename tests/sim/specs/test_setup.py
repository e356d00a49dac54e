"""What the serving core is given: vLLM 0.33's own resolved geometry, and how settings move it."""

from __future__ import annotations

import pytest

from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind, ServingSetup


def _setup(*overrides: str, pool: PoolKind = PoolKind.PACKED) -> ServingSetup:
    return Scenario.load(overrides=["kv.gpu_kv_gib=17.8", *overrides]).setup(pool)


def test_a_656_byte_row_resolves_as_vllm_033_logged_it() -> None:
    setup = _setup()
    assert (setup.row_bytes, setup.gpu_block_bytes, setup.num_gpu_blocks) == (656, 209_920, 91_047)
    assert setup.num_usable_gpu_blocks == 91_046
    assert (setup.num_host_blocks, setup.host_block_stride_bytes) == (125_829, 3_276_800)
    assert (setup.num_resident_groups, setup.hot_pages_per_group) == (20, 64)
    assert (setup.hot_blocks_per_request, setup.transition_watermark_blocks) == (1280, 9104)
    assert (setup.max_in_flight_tokens, setup.admission_cap_pages) == (65_536, 1024)
    assert (setup.baseline_num_blocks, setup.baseline_block_bytes) == (5536, 3_452_160)


def test_a_576_byte_row_resolves_as_vllm_033_logged_it() -> None:
    setup = _setup("kv.dtype=fp8")
    assert (setup.row_bytes, setup.gpu_block_bytes, setup.num_gpu_blocks) == (576, 184_320, 103_692)
    assert (setup.num_host_blocks, setup.host_block_stride_bytes) == (143_395, 2_875_392)
    assert setup.transition_watermark_blocks == 10_369


def test_a_whole_pool_holds_one_block_a_page_and_no_hot_buffer() -> None:
    setup = _setup(pool=PoolKind.WHOLE)
    assert (setup.num_gpu_blocks, setup.gpu_block_bytes) == (5536, 3_452_160)
    assert (setup.num_resident_groups, setup.blocks_per_full_page) == (1, 1)
    assert (setup.hot_rows, setup.hot_blocks_per_request, setup.transition_watermark_blocks) == (0, 0, 0)


def test_a_packed_page_takes_one_indexer_block_and_one_block_a_group() -> None:
    assert _setup().blocks_per_full_page == 21


def test_a_smaller_step_shrinks_the_admission_cap() -> None:
    assert _setup("scheduler.max_num_batched_tokens=8192").admission_cap_pages == 256
    assert _setup("scheduler.async_depth=1").admission_cap_pages == 512
    assert _setup("scheduler.max_model_len=10000").admission_cap_pages == 157


def test_admission_and_steady_blocks_are_those_of_the_closed_form() -> None:
    setup = _setup()
    assert setup.admission_blocks(80_000) == 1250 + 20 * 1024
    assert setup.admission_blocks(32_768) == 21 * 512
    assert setup.steady_blocks(80_000) == 1250 + 1280 + 40


@pytest.mark.parametrize("override", ["kv.gpu_kv_gib=20", "kv.num_gpu_blocks=91047"])
def test_gpu_overrides_never_touch_the_host_pool(override: str) -> None:
    plain = Scenario.load().setup(PoolKind.PACKED)
    overridden = Scenario.load(overrides=[override]).setup(PoolKind.PACKED)
    assert overridden.num_gpu_blocks != plain.num_gpu_blocks
    assert overridden.num_host_blocks == plain.num_host_blocks


def test_a_block_count_from_a_log_is_taken_as_it_is() -> None:
    setup = Scenario.load(overrides=["kv.num_gpu_blocks=91047"]).setup(PoolKind.PACKED)
    assert setup.num_gpu_blocks == 91_047


def test_a_packed_block_count_is_refused_for_a_whole_pool_that_no_gpu_could_hold() -> None:
    scenario = Scenario.load(overrides=["kv.num_gpu_blocks=91047"])
    with pytest.raises(ScenarioError, match=r"give kv\.gpu_kv_gib"):
        scenario.setup(PoolKind.WHOLE)


def test_the_offload_tier_is_shared_out_to_the_ranks() -> None:
    setup = _setup(pool=PoolKind.WHOLE)
    assert setup.prefix_offload_bytes_per_rank == 64 * 2**30
    assert setup.num_prefix_offload_blocks == 64 * 2**30 // 3_452_160


def test_one_rank_keeps_its_host_pool_to_itself_without_padding() -> None:
    setup = Scenario.load(
        overrides=["parallel.tp=1", "parallel.dp=8", "parallel.ep=true", "kv.host_pool_gib=200"]
    ).setup(PoolKind.PACKED)
    assert not setup.host_pool_shared
    assert setup.host_block_stride_bytes == setup.host_block_bytes


@pytest.mark.parametrize(
    ("override", "field", "grows"),
    [
        ("kv.gpu_memory_utilization=0.95", "num_gpu_blocks", True),
        ("kv.runtime_reserve_gib=20", "num_gpu_blocks", False),
        ("node.memory=nominal", "num_gpu_blocks", False),
        ("node.preset=b200x8", "num_gpu_blocks", True),
        ("model.weights=nvfp4", "num_gpu_blocks", True),
        ("kv.dtype=bf16", "num_gpu_blocks", False),
        ("kv.dtype=fp8", "num_host_blocks", True),
        ("kv.host_pool_gib=100", "num_host_blocks", False),
        ("kv.prefix_offload_gib=100", "num_prefix_offload_blocks", False),
        ("kv.hot_rows=8192", "hot_blocks_per_request", True),
        ("model.preset=glm-5.1", "num_indexers", True),
        ("speculation.draft_tokens=1", "query_len", True),
    ],
)
def test_a_setting_moves_the_pool_it_claims_to_move(override: str, field: str, grows: bool) -> None:
    before = getattr(Scenario.load().setup(PoolKind.PACKED), field)
    after = getattr(Scenario.load(overrides=[override]).setup(PoolKind.PACKED), field)
    assert (after > before) if grows else (after < before)
