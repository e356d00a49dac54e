"""Model geometry, the IndexShare rule, presets and weight bytes."""

from __future__ import annotations

import pytest

from hisparsim.specs.budget import gpu_budget
from hisparsim.specs.errors import ScenarioError, UnknownNameError, WeightsDoNotFitError
from hisparsim.specs.models import load_model, model_names
from hisparsim.specs.nodes import MemoryFigure, load_node, node_names
from hisparsim.specs.presets import PresetKind, load_preset, preset_names
from hisparsim.specs.weights import GIB, WeightFormat, weight_bytes


@pytest.mark.parametrize(
    ("name", "layers", "indexers"),
    [
        ("glm-5.3", 78, 21),
        ("glm-5.2", 78, 21),
        ("glm-5.1", 78, 78),
        ("glm-5", 78, 78),
        ("deepseek-v3.2", 61, 61),
        ("tiny-dsa", 14, 5),
    ],
)
def test_a_preset_has_its_published_layers_and_indexers(name: str, layers: int, indexers: int) -> None:
    model = load_model(name)
    assert (model.name, model.num_layers, model.num_indexers) == (name, layers, indexers)


def test_glm_53_owns_indexers_in_0_1_and_every_fourth_layer_from_2() -> None:
    assert load_model("glm-5.3").indexer_layers == (0, 1, *range(2, 78, 4))


def test_tiny_dsa_owns_indexers_in_0_1_2_6_10_and_has_the_true_row() -> None:
    model = load_model("tiny-dsa")
    assert model.indexer_layers == (0, 1, 2, 6, 10)
    assert (model.latent_size, model.hidden_size, model.num_heads, model.index_top_k) == (576, 256, 8, 128)
    assert (model.num_routed_experts, model.num_experts_per_token, model.vocab_size) == (8, 2, 1024)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("with_mtp", [False, True])
def test_index_units_cover_every_layer_once_and_start_with_an_owner(name: str, with_mtp: bool) -> None:
    model = load_model(name)
    units = model.index_units(with_mtp=with_mtp)
    assert [layer for unit in units for layer in unit] == list(range(model.num_kv_layers(with_mtp=with_mtp)))
    assert all(model.owns_indexer(unit[0]) for unit in units)
    assert not any(model.owns_indexer(layer) for unit in units for layer in unit[1:])


@pytest.mark.parametrize("kind", list(PresetKind))
def test_every_figure_of_every_preset_names_its_source(kind: PresetKind) -> None:
    for name in preset_names(kind):
        preset = load_preset(kind, name)
        figures = {key for key, value in _leaves(preset.values) if isinstance(value, int | float)}
        assert figures <= set(preset.sources), name
        assert all(preset.sources[key] for key in figures), name


def _leaves(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


@pytest.mark.parametrize("name", node_names())
def test_every_node_loads_and_its_rates_are_ordered_as_hardware_must(name: str) -> None:
    node = load_node(name)
    for mode in (node.pcie.copy_engine, node.pcie.kernel):
        assert mode.alone.h2d_bytes_per_s < node.pcie.nominal_bytes_per_s
        assert mode.all_gpus.h2d_bytes_per_s <= mode.alone.h2d_bytes_per_s
        assert mode.all_gpus_duplex.h2d_bytes_per_s <= mode.alone_duplex.h2d_bytes_per_s
        assert mode.alone_duplex.d2h_bytes_per_s <= mode.alone.d2h_bytes_per_s
    assert (node.socket_link_bytes_per_s is None) == (node.num_sockets == 1)
    assert node.reported_memory_bytes > node.nominal_memory_bytes


def test_each_eight_gpu_node_has_a_one_gpu_variant() -> None:
    eight = [name for name in node_names() if name.endswith("x8")]
    assert {f"{name.removesuffix('x8')}x1" for name in eight} == set(node_names()) - set(eight)
    assert all(load_node(f"{name.removesuffix('x8')}x1").num_gpus == 1 for name in eight)


def test_an_h200_reports_143771_mib_and_the_calculator_takes_141e9_bytes() -> None:
    node = load_node("h200x8")
    assert node.gpu_memory_bytes(MemoryFigure.REPORTED) == 143_771 * 2**20
    assert node.gpu_memory_bytes(MemoryFigure.NOMINAL) == 141_000_000_000


def test_fp8_weights_of_glm_53_follow_from_geometry_to_the_published_digit() -> None:
    weights = weight_bytes(load_model("glm-5.3"), WeightFormat.FP8)
    assert round(weights.shared / GIB, 3) == 19.556
    assert round(weights.experts / GIB, 3) == 684.167


def test_smaller_weight_formats_shrink_the_experts_and_leave_the_shared_part_as_fp8() -> None:
    by_format = {w: weight_bytes(load_model("glm-5.3"), w) for w in WeightFormat}
    sizes = [
        by_format[w].experts
        for w in (WeightFormat.W4A8, WeightFormat.NVFP4, WeightFormat.FP8, WeightFormat.BF16)
    ]
    assert sizes == sorted(sizes)
    assert by_format[WeightFormat.NVFP4].shared == by_format[WeightFormat.FP8].shared
    assert by_format[WeightFormat.BF16].shared > by_format[WeightFormat.FP8].shared


@pytest.mark.parametrize(
    ("node", "tp", "dp", "gpu_kv_gib"),
    [
        ("h200x8", 8, 1, 17.8),
        ("b200x8", 8, 1, 51.3),
        ("b300x8", 8, 1, 143.8),
        ("h200x8", 8, 2, 60.6),
        ("h200x8", 1, 16, 43.5),
        ("h200x8", 4, 2, 15.4),
        ("h200x8", 1, 8, 0.7),
    ],
)
def test_the_budget_is_the_published_calculators(node: str, tp: int, dp: int, gpu_kv_gib: float) -> None:
    budget = gpu_budget(load_model("glm-5.3"), load_node(node), tp=tp, dp=dp, ep=True)
    assert budget.gpu_kv_gib == gpu_kv_gib


def test_the_reported_memory_gives_nine_gib_times_utilization_more() -> None:
    model, node = load_model("glm-5.3"), load_node("h200x8")
    nominal = gpu_budget(model, node, memory=MemoryFigure.NOMINAL)
    reported = gpu_budget(model, node, memory=MemoryFigure.REPORTED)
    assert reported.memory_gib - nominal.memory_gib == pytest.approx(9.08, abs=0.01)
    assert reported.gpu_kv_gib == pytest.approx(26.2)


def test_weights_that_do_not_fit_are_refused_with_what_is_missing() -> None:
    with pytest.raises(WeightsDoNotFitError, match=r"glm-5\.3 in fp8 do not fit h200x8 at tp 4.*GiB missing"):
        gpu_budget(load_model("glm-5.3"), load_node("h200x8"), tp=4)


def test_nvfp4_weights_fit_rtx_pro_cards_on_which_fp8_does_not() -> None:
    model, node = load_model("glm-5.3"), load_node("rtx-pro-6000x8")
    with pytest.raises(WeightsDoNotFitError):
        gpu_budget(model, node, weights=WeightFormat.FP8)
    assert gpu_budget(model, node, weights=WeightFormat.NVFP4).gpu_kv_gib > 10


@pytest.mark.parametrize("load", [load_model, load_node])
def test_an_unknown_preset_is_refused_with_the_nearest_and_all_known_names(load) -> None:  # type: ignore[no-untyped-def]
    known = model_names() if load is load_model else node_names()
    typo = f"{known[0]}0"
    with pytest.raises(UnknownNameError) as caught:
        load(typo)
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in known)
    assert f"did you mean {known[0]!r}" in message


def test_a_preset_file_of_ones_own_may_start_from_a_bundled_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.toml"
    path.write_text('base = "glm-5.3"\nnum_layers = 20\n')
    model = load_model(str(path))
    assert (model.name, model.num_layers, model.hidden_size) == ("mine", 20, 6144)


@pytest.mark.parametrize("text", ["num_layers = ", "num_layers = 0", 'base = "glm-5.3"\nsize = 3'])
def test_a_broken_preset_file_is_refused_in_one_line(tmp_path, text: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_model(str(path))
    assert "broken.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
