"""The scenario file: defaults, overrides, provenance, refusals."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.specs.errors import PoolTooSmallError, ScenarioError, UnknownNameError, WeightsDoNotFitError
from hisparsim.specs.kv_layout import RowFormat
from hisparsim.specs.nodes import MemoryFigure
from hisparsim.specs.scenario import Origin, Scenario, known_keys
from hisparsim.specs.sections import CostSource
from hisparsim.specs.setup import PoolKind


def test_defaults_are_glm_53_on_eight_h200_at_tp8_with_the_published_serving_limits() -> None:
    scenario = Scenario.load()
    assert (scenario.model.preset, scenario.node.preset) == ("glm-5.3", "h200x8")
    assert (scenario.parallel.tp, scenario.parallel.dp) == (8, 1)
    scheduler = scenario.scheduler
    assert (scheduler.max_model_len, scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (
        142_000,
        32_768,
        256,
    )
    assert (scenario.host_pool_gib, scenario.prefix_offload_gib, scenario.hot_rows) == (384, 512, 4096)
    assert (scenario.kv.gpu_memory_utilization, scenario.kv.runtime_reserve_gib) == (0.92, 15)
    assert scenario.node.memory is MemoryFigure.REPORTED
    assert scenario.row_format is RowFormat.FP8_DS_MLA


def test_every_key_of_a_file_is_read_and_known_by_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'seed = 7\n[kv]\ndtype = "bf16"\nhost_pool_gib = 100\n[policy]\nname = "thrash"\nperiod = 3\n'
        '[workload]\ntime_scale = 0.5\n[cost]\nsource = "measured"\n'
    )
    scenario = Scenario.load(path, overrides=["workload.time_scale=2", "kv.hot_rows=8192"])
    assert (scenario.seed, scenario.row_format, scenario.host_pool_gib) == (7, RowFormat.BF16, 100)
    assert (scenario.policy.name, scenario.policy.options) == ("thrash", {"period": 3})
    assert scenario.cost.source is CostSource.MEASURED
    assert (scenario.workload.time_scale, scenario.hot_rows) == (2, 8192)
    assert scenario.origin("kv.dtype") is Origin.FILE
    assert scenario.origin("workload.time_scale") is Origin.SET
    assert scenario.origin("kv.prefix_caching") is Origin.DEFAULT


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.25", 0.25), ("true", True), ("lazy", "lazy"), ('"7"', "7"), ("null", None)],
)
def test_policy_switches_are_read_as_toml_and_else_as_text(text: str, value: object) -> None:
    assert Scenario.load(overrides=[f"policy.switch={text}"]).policy.options == {"switch": value}


def test_null_gives_a_key_back_to_its_rule() -> None:
    scenario = Scenario.load(overrides=["kv.hot_rows=8192"]).with_overrides(["kv.hot_rows=null"])
    assert scenario.hot_rows == 4096


def test_overrides_keep_what_earlier_ones_set() -> None:
    scenario = Scenario.load(overrides=["seed=3"]).with_overrides(["kv.hot_rows=8192"])
    assert (scenario.seed, scenario.kv.hot_rows, scenario.origin("seed")) == (3, 8192, Origin.SET)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("kv.hotrows=1", "kv.hot_rows"),
        ("max_num_seqs=4", "scheduler.max_num_seqs"),
        ("sched.max_num_seqs=4", "scheduler.max_num_seqs"),
        ("zeed=3", "seed"),
        ("workload.timescale=2", "workload.time_scale"),
        ("kv.max_num_seqs=3", "scheduler.max_num_seqs"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(override: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'") as caught:
        Scenario.load(overrides=[override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["foo"], "section.key=value"),
        (["kv=3"], "kv"),
        (["model.preset=glm5.3"], "did you mean 'glm-5.3'"),
        (["model.preset=glm5.2"], "did you mean 'glm-5.2'"),
        (["node.preset=h2000x8"], "did you mean 'h200x8'"),
        (["scheduler.max_num_seqs=0"], "scheduler.max_num_seqs"),
        (["scheduler.max_num_seqs=many"], "scheduler.max_num_seqs"),
        (["workload.time_scale=nan"], "workload.time_scale"),
        (["workload.time_scale=-1"], "workload.time_scale"),
        (["kv.dtype=fp4"], "kv.dtype"),
        (["kv.hot_rows=2047"], "2048..32768"),
        (["kv.hot_rows=32769"], "2048..32768"),
        (["speculation.draft_tokens=3", "kv.hot_rows=8191"], "8192..32768"),
        (["parallel.dp=2"], "16 GPUs"),
        (["parallel.tp=3"], "does not divide"),
        (["kv.host_pool_gib=3000"], "95%"),
        (["scheduler.max_model_len=2000000"], "1048576 positions"),
        (["scheduler.max_num_batched_tokens=128"], "max_num_seqs 256"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(overrides=overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[kv\n", b"\xff\xfe\x00", b"kv = 3\n", b"[nonsense]\nx = 1\n"])
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"nowhere\.toml' does not exist"):
        Scenario.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["parallel.tp=4"], WeightsDoNotFitError),
        (["node.preset=h100x8"], WeightsDoNotFitError),
        (["kv.num_gpu_blocks=1000"], PoolTooSmallError),
        (["kv.host_pool_gib=0.001"], PoolTooSmallError),
    ],
)
def test_a_node_or_pool_that_is_too_small_is_refused_by_name(
    overrides: list[str], error: type[ScenarioError]
) -> None:
    with pytest.raises(error):
        Scenario.load(overrides=overrides).setup(PoolKind.PACKED)


def test_drafts_raise_the_hot_rows_and_cache_the_mtp_layer() -> None:
    scenario = Scenario.load(overrides=["speculation.draft_tokens=3"])
    assert scenario.hot_rows == 10_240
    setup = scenario.setup(PoolKind.PACKED)
    assert (setup.num_layers, setup.num_resident_groups, setup.hot_blocks_per_request) == (79, 21, 3360)


def test_a_small_node_lowers_the_default_host_pool_and_says_so() -> None:
    overrides = ["node.preset=h200x1", "parallel.tp=1", "model.preset=tiny-dsa"]
    scenario = Scenario.load(overrides=overrides)
    value = next(v for v in scenario.resolved() if v.key == "kv.host_pool_gib")
    assert (value.value, value.origin) == (243, Origin.DERIVED)
    assert "95 %" in value.source


def test_resolved_lists_every_key_and_every_preset_figure_with_its_origin() -> None:
    values = {v.key: v for v in Scenario.load(overrides=["kv.hot_rows=8192", "policy.mode=x"]).resolved()}
    assert set(known_keys()) <= set(values)
    assert values["policy.mode"].origin is Origin.SET
    assert values["kv.hot_rows"].origin is Origin.SET
    assert values["kv.host_pool_gib"].origin is Origin.DEFAULT
    assert values["model.num_layers"].origin is Origin.PRESET
    assert values["model.num_layers"].source
    assert values["node.pcie.kernel.all_gpus.h2d_bytes_per_s"].source
    assert values["derived.gpu_kv_gib"].value == pytest.approx(26.2)
    assert "reported" in values["derived.gpu_kv_gib"].source
    assert values["derived.row_format"].value == "fp8_ds_mla"


def test_every_key_has_a_description_in_the_schema() -> None:
    schema = Scenario.model_json_schema()
    sections = [name for name in schema["$defs"] if name.endswith("Section")]
    assert len(sections) == 12
    for section in sections:
        for key, entry in schema["$defs"][section]["properties"].items():
            assert entry.get("description"), f"{section}.{key}"
    json.dumps(schema)


def test_a_scenario_survives_pickling_with_its_origins() -> None:
    scenario = pickle.loads(pickle.dumps(Scenario.load(overrides=["seed=5"])))
    assert (scenario.seed, scenario.origin("seed")) == (5, Origin.SET)
    assert scenario.setup(PoolKind.PACKED) == Scenario.load().setup(PoolKind.PACKED)


@given(
    seed=st.integers(0, 2**40),
    hot_rows=st.integers(2048, 32_768),
    max_num_seqs=st.integers(1, 512),
    time_scale=st.floats(1e-3, 1e3),
    prefix_caching=st.booleans(),
)
def test_what_a_scenario_dumps_loads_to_the_same_scenario(
    seed: int, hot_rows: int, max_num_seqs: int, time_scale: float, prefix_caching: bool
) -> None:
    overrides = [
        f"seed={seed}",
        f"kv.hot_rows={hot_rows}",
        f"scheduler.max_num_seqs={max_num_seqs}",
        f"workload.time_scale={time_scale!r}",
        f"kv.prefix_caching={str(prefix_caching).lower()}",
    ]
    scenario = Scenario.load(overrides=overrides)
    again = Scenario.from_values(scenario.model_dump(mode="json"))
    assert again.model_dump() == scenario.model_dump()
    assert (scenario.seed, scenario.kv.hot_rows) == (seed, hot_rows)
    assert (scenario.workload.time_scale, scenario.kv.prefix_caching) == (time_scale, prefix_caching)


def test_the_user_page_lists_every_key_with_its_default_and_meaning() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text(encoding="utf-8")
    for name, info in Scenario.model_fields.items():
        section = info.annotation
        for key, field in getattr(section, "model_fields", {}).items():
            default = getattr(field.default, "value", field.default)
            shown = "null" if default is None else str(default)
            shown = shown.lower() if isinstance(default, bool) else shown
            assert f"| `{name}.{key}` | {shown} | {field.description} |" in page
