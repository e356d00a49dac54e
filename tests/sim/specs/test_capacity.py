"""Capacity: the published calculator to the digit, vLLM 0.33's admission, the dead bands, the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hisparsim.cli.app import run
from hisparsim.cli.capacity import capacity as capacity_command
from hisparsim.cli.scenario import app as scenario_app
from hisparsim.specs.capacity import Capacity
from hisparsim.specs.errors import ScenarioError, WeightsDoNotFitError
from hisparsim.specs.kv_layout import RowFormat, pages_of
from hisparsim.specs.models import load_model
from hisparsim.specs.nodes import load_node

GLM = load_model("glm-5.3")
H200 = load_node("h200x8")
ROW_KEYS = [
    "context_tokens",
    "gpu_kv_gib",
    "gpu_block_bytes",
    "host_block_bytes",
    "host_block_stride_bytes",
    "baseline_requests",
    "hybrid_requests",
    "min_host_gib",
    "admission_requests",
]

app = typer.Typer()
app.command()(capacity_command)
app.add_typer(scenario_app, name="scenario")
runner = CliRunner()


def _h200(**changes: object) -> Capacity:
    return Capacity(GLM, H200, **{"row_format": RowFormat.FP8, "ep": True, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("context", "baseline", "hybrid", "min_host_gib"),
    [(8_192, 48, 71, 25), (81_920, 4, 39, 134), (1_048_576, 0, 5, 220)],
)
def test_published_cells_of_vllms_calculator_are_met(
    context: int, baseline: int, hybrid: int, min_host_gib: int
) -> None:
    row = _h200().row(context)
    assert (row.baseline_requests, row.hybrid_requests, row.min_host_gib) == (baseline, hybrid, min_host_gib)


def test_every_cell_of_the_published_calculator_is_met(reference_dir: Path) -> None:
    with (reference_dir / "reference" / "capacity.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert cells
    for cell in cells:
        row = Capacity(
            GLM,
            load_node(f"{cell['gpu']}x8"),
            tp=int(cell["tp"]),
            dp=int(cell["dp"]),
            ep=cell["ep"] == "on",
            row_format=RowFormat(cell["kv"]),
            hot_rows=int(cell["hot_rows"]),
        ).row(int(cell["context_tokens"]))
        assert row.baseline_requests == int(cell["baseline_requests"]), cell
        assert row.hybrid_requests == int(cell["hisparse_requests"]), cell
        if cell["min_host_gib"]:
            assert row.min_host_gib == int(cell["min_host_gib"]), cell


@pytest.mark.parametrize(
    ("changes", "context", "admitted"),
    [
        ({}, 80_000, 27),
        ({"hot_rows": 2048}, 80_000, 36),
        ({}, 32_768, 44),
        ({"max_num_batched_tokens": 8192}, 32_768, 47),
        ({"row_format": RowFormat.FP8}, 80_000, 32),
        ({}, 131_072, 21),
        ({}, 1_000_000, 4),
        ({}, 4_096, 65),
        ({"host_gib": 16}, 80_000, 4),
        ({"host_gib": 24}, 32_768, 15),
        ({"max_num_seqs": 20}, 32_768, 20),
    ],
)
def test_admission_is_the_peak_that_vllm_033_ran(
    changes: dict[str, object], context: int, admitted: int
) -> None:
    counted = _h200(**{"row_format": RowFormat.FP8_DS_MLA, **changes})
    assert counted.row(context).admission_requests == admitted


def test_sixty_thousand_token_prompts_lie_in_a_dead_band_and_32k_and_80k_do_not() -> None:
    counted = _h200(row_format=RowFormat.FP8_DS_MLA)
    assert counted.dead_band_requests(60_000) == 4
    assert counted.dead_band_requests(32_768) is None
    assert counted.dead_band_requests(80_000) is None


def test_the_bands_hold_exactly_the_lengths_that_never_offload() -> None:
    counted = _h200(row_format=RowFormat.FP8_DS_MLA)
    bands = counted.dead_bands()
    assert bands
    for tokens in range(64, 70_000, 64):
        band = [b.requests for b in bands if b.first_tokens <= tokens <= b.last_tokens]
        assert (band[0] if band else None) == counted.dead_band_requests(tokens)


def _played(counted: Capacity, context: int) -> int:
    """Admit cold requests one by one; each shrinks to its steady blocks before the next asks."""
    pages, groups = pages_of(context), counted.layout.num_groups
    free, running = counted.num_gpu_blocks - 1, 0
    steady = pages + counted.hot_blocks + 2 * groups
    while free >= pages + groups * min(pages, counted.admission_cap_pages) and running < counted.max_num_seqs:
        free -= steady
        running += 1
    return running


@given(
    context=st.integers(1, 1_048_576),
    hot_rows=st.integers(2048, 32_768),
    row_format=st.sampled_from(list(RowFormat)),
    node=st.sampled_from(["h200x8", "b200x8", "b300x8"]),
    max_num_batched_tokens=st.sampled_from([2048, 8192, 32_768]),
)
def test_the_closed_form_equals_admitting_one_by_one(
    context: int, hot_rows: int, row_format: RowFormat, node: str, max_num_batched_tokens: int
) -> None:
    counted = Capacity(
        GLM,
        load_node(node),
        row_format=row_format,
        hot_rows=hot_rows,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    assert counted.row(context).admission_requests == _played(counted, context)


@given(context=st.integers(1, 1_000_000), hot_rows=st.integers(2048, 8192), host_gib=st.floats(1, 2000))
def test_more_context_more_hot_rows_or_less_host_never_fit_more(
    context: int, hot_rows: int, host_gib: float
) -> None:
    row = _h200(hot_rows=hot_rows, host_gib=host_gib).row(context)
    longer = _h200(hot_rows=hot_rows, host_gib=host_gib).row(context + 40_000)
    hotter = _h200(hot_rows=hot_rows + 1024, host_gib=host_gib).row(context)
    smaller = _h200(hot_rows=hot_rows, host_gib=host_gib / 2).row(context)
    for other in (longer, hotter, smaller):
        assert other.hybrid_requests <= row.hybrid_requests
        assert other.admission_requests <= row.admission_requests
    assert row.hybrid_requests >= row.baseline_requests
    assert row.min_host_gib <= host_gib + 1


def test_two_replicas_take_two_nodes_and_share_their_experts() -> None:
    counted = _h200(dp=2)
    assert counted.num_nodes == 2
    row = counted.row(81_920)
    assert (row.gpu_kv_gib, row.baseline_requests, row.hybrid_requests) == (60.6, 32, 270)


def test_without_expert_parallelism_replicas_win_no_memory() -> None:
    assert _h200(dp=2, ep=False).row(81_920).gpu_kv_gib == 17.8


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WeightsDoNotFitError):
        _h200(tp=4).row(8192)


@pytest.mark.parametrize(
    "changes",
    [{"tp": 0}, {"tp": 7}, {"hot_rows": 2047}, {"hot_rows": 32_769}, {"host_gib": 0.0}, {"async_depth": 0}],
)
def test_a_value_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ScenarioError):
        _h200(**changes)


@pytest.mark.parametrize("context", [0, -1, 1_048_577])
def test_a_context_that_the_model_does_not_have_is_refused(context: int) -> None:
    with pytest.raises(ScenarioError, match=r"outside 1\.\.1048576"):
        _h200().row(context)


def test_the_command_prints_rows_with_the_agreed_keys_and_the_memory_figure_it_took() -> None:
    result = runner.invoke(
        app, ["capacity", "--context", "81920", "--context", "8192", "--kv", "fp8", "--ep", "--json"]
    )
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert [list(row) for row in printed["rows"]] == [ROW_KEYS, ROW_KEYS]
    assert [row["context_tokens"] for row in printed["rows"]] == [81_920, 8_192]
    assert printed["rows"][0]["hybrid_requests"] == 39
    assert printed["assumptions"]["node_memory"] == "nominal"


def test_the_table_names_the_memory_figure_and_draws_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "capacity.png"
    result = runner.invoke(app, ["capacity", "--kv", "auto", "--context", "60000", "--plot", str(path)])
    assert result.exit_code == 0
    assert "nominal" in result.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ["capacity", "--tp", "4"],
        ["capacity", "--kv", "fp4"],
        ["capacity", "--weights", "int3"],
        ["capacity", "--memory", "free"],
        ["capacity", "--model", "glm5"],
        ["capacity", "--node", "h300x8"],
        ["capacity", "--hot-rows", "1024"],
        ["capacity", "--context", "0"],
        ["capacity", "--plot", "figure.abc"],
        ["capacity", "--context", "8192", "--plot", "/nowhere/at/all.png"],
        ["scenario", "show", "--set", "kv.hotrows=1"],
        ["scenario", "show", "nowhere.toml"],
        ["scenario", "show", "--set", "parallel.tp=4"],
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_scenario_show_prints_values_with_their_origin() -> None:
    result = runner.invoke(app, ["scenario", "show", "--set", "links.h2d_gb_per_s=inf", "--json"])
    assert result.exit_code == 0
    values = {entry["key"]: entry for entry in json.loads(result.stdout)["values"]}
    assert values["links.h2d_gb_per_s"]["value"] == "inf"
    assert values["links.h2d_gb_per_s"]["origin"] == "--set"
    assert values["model.num_layers"]["origin"] == "preset"
    table = runner.invoke(app, ["scenario", "show"])
    assert "scheduler.max_num_batched_tokens" in table.stdout


def test_scenario_schema_is_json() -> None:
    result = runner.invoke(app, ["scenario", "schema"])
    assert json.loads(result.stdout)["title"] == "Scenario"


def test_the_user_page_names_the_bands_that_are_computed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text(encoding="utf-8")
    for band in _h200(row_format=RowFormat.FP8_DS_MLA).dead_bands():
        assert f"| {band.first_tokens:,} to {band.last_tokens:,} | {band.requests} |" in page
