"""The ahead-of-time gate: limits, the registered cases, the report of a real compilation, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hisparsim_kernels import aot, cli, configs, registry
from hisparsim_kernels.configs import ResourceLimits
from hisparsim_kernels.errors import AotError, ConfigError

FIELDS = {
    "name",
    "config",
    "registers",
    "stack_bytes",
    "spill_instructions",
    "shared_bytes",
    "tensor_core",
    "async_copy_128",
    "passed",
}
MEASURED: dict[str, Any] = {
    "registers": 100,
    "stack_bytes": 0,
    "spill_instructions": 0,
    "shared_bytes": 1000,
    "async_copy_128": 4,
    "narrow_loads": 0,
}


def test_figures_within_every_limit_break_none() -> None:
    limits = ResourceLimits(registers=100, shared_bytes=1000, tensor_core="HGMMA", async_copy_128=4)
    assert aot.violations_of(limits, MEASURED, {"HGMMA": 3}) == ()


@pytest.mark.parametrize(
    ("change", "cores", "line"),
    [
        ({"registers": 101}, {"HGMMA": 1}, "registers 101 > 100"),
        ({"stack_bytes": 8}, {"HGMMA": 1}, "stack_bytes 8 > 0"),
        ({"spill_instructions": 2}, {"HGMMA": 1}, "spill_instructions 2 > 0"),
        ({"shared_bytes": 2000}, {"HGMMA": 1}, "shared_bytes 2000 > 1000"),
        ({"async_copy_128": 0}, {"HGMMA": 1}, "async_copy_128 0 < 4"),
        ({"narrow_loads": 216}, {"HGMMA": 1}, "narrow_loads 216 > 0"),
        ({}, {"HMMA": 9}, "no HGMMA instruction (found {'HMMA': 9})"),
    ],
)
def test_each_broken_limit_is_one_line_with_figure_and_limit(
    change: dict[str, int], cores: dict[str, int], line: str
) -> None:
    limits = ResourceLimits(registers=100, shared_bytes=1000, tensor_core="HGMMA", async_copy_128=4)
    assert aot.violations_of(limits, MEASURED | change, cores) == (line,)


def test_the_instruction_that_replaced_hoppers_on_the_next_architecture_is_accepted() -> None:
    limits = ResourceLimits(tensor_core="QGMMA")
    assert aot.violations_of(limits, MEASURED, {"UTCQMMA": 1}) == ()
    assert aot.violations_of(limits, MEASURED, {"UTCHMMA": 1}) != ()


@pytest.mark.parametrize("module", registry.KERNEL_MODULES)
def test_every_configuration_is_compiled_by_a_case_and_every_case_has_its_configuration(module: str) -> None:
    cases = registry.aot_cases((module,))[module]
    reached = {(case.kernel, case.config) for case in cases}
    known = {(config.kernel, config.name) for config in configs.configs_of(module)}
    assert reached == known
    labels = [(case.kernel, case.label) for case in cases]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("module", registry.KERNEL_MODULES)
def test_every_configuration_says_why_and_records_figures_within_its_limits(module: str) -> None:
    for config in configs.configs_of(module):
        assert len(config.why) > 10, config
        absent = {"stack_bytes": 0, "spill_instructions": 0, "shared_bytes": 0, "tensor_core": {}}
        measured = absent | {"async_copy_128": 0, "narrow_loads": 0} | dict(config.measured)
        assert measured["stack_bytes"] == measured["spill_instructions"] == 0, config
        assert aot.violations_of(config.limits, measured, measured["tensor_core"]) == ()


def test_attention_and_indexer_require_tensor_cores() -> None:
    for module, kernel in (
        ("mla_decode", "mla_decode_split"),
        ("mla_prefill", "mla_prefill"),
        ("indexer", "indexer_logits"),
        ("grouped_gemm", "grouped_gemm"),
    ):
        for config in configs.configs_of(module):
            if config.kernel == kernel:
                assert config.limits.tensor_core is not None
                assert config.limits.async_copy_128 > 0


def test_an_architecture_without_a_file_of_its_own_uses_that_of_hopper() -> None:
    assert configs.configs_of("rows", "sm_120") == configs.configs_of("rows", "sm_90")


def test_unknown_configurations_and_bad_data_are_named() -> None:
    with pytest.raises(ConfigError, match="known: bf16, fp8_ds_mla"):
        configs.find_config("rows", "write_rows", "fp4")
    with pytest.raises(ConfigError, match=r"sm_90/nothing\.toml"):
        configs.configs_of("nothing")
    with pytest.raises(ConfigError, match="'XMMA'"):
        ResourceLimits(tensor_core="XMMA")
    with pytest.raises(ConfigError, match="num_warps 3"):
        configs.LaunchConfig("kernel", "name", num_warps=3, num_stages=1)


def test_compiling_under_the_interpreter_is_refused() -> None:
    case = registry.aot_cases(("rows",))["rows"][0]
    with pytest.raises(AotError, match="TRITON_INTERPRET"):
        aot.compile_case("rows", case, "sm_90")


def test_the_command_compiles_in_a_process_of_its_own_and_prints_the_report() -> None:
    arguments = ["aot", "--arch", "sm_90a", "--modules", "rows", "--json", "--processes", "1"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["arch"] == "sm_90a" and report["triton"]
    assert {entry["name"] for entry in report["kernels"]} == {"write_rows", "read_rows"}
    for entry in report["kernels"]:
        assert set(entry) >= FIELDS and entry["passed"] and 0 < entry["registers"] <= 255


def test_a_case_that_an_architecture_refuses_is_an_entry_and_the_others_are_still_compiled() -> None:
    arguments = ["aot", "--arch", "sm_80", "--modules", "rows", "--json", "--processes", "1"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 1
    passed = {(entry["name"], entry["config"]): entry for entry in json.loads(done.stdout)["kernels"]}
    assert passed["write_rows", "bf16"]["passed"] and passed["read_rows", "bf16"]["passed"]
    for name in ("write_rows", "read_rows"):
        refused = passed[name, "fp8_ds_mla"]
        assert set(refused) >= FIELDS and not refused["passed"]
        assert "does not compile for sm_80: type fp8e4nv not supported" in refused["violations"][0]


def test_a_broken_limit_fails_the_command_and_shows_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = MEASURED | {"name": "k", "config": "c", "tensor_core": {}, "passed": False}
    report = {"arch": "sm_90", "triton": "x", "kernels": [entry | {"violations": ["registers 101 > 100"]}]}
    monkeypatch.setattr(aot, "report_in_own_process", lambda *arguments: report)
    done = CliRunner().invoke(cli.app, ["aot"])
    assert done.exit_code == 1 and "registers 101 > 100" in done.stdout


def test_bad_input_ends_with_status_2_and_the_known_names() -> None:
    for arguments, known in (
        (["aot", "--arch", "sm_70"], "sm_90"),
        (["aot", "--modules", "rows,topq"], "topk"),
        (["bench", "--device", "tpu"], "cuda, cpu"),
        (
            ["bench", "--device", "cpu", "--out", "no/such/folder/rows.csv"],
            "no/such/folder is not a directory",
        ),
        (["check", "--device", "tpu"], "cuda, cpu"),
        (["plot", "missing.csv", "--out", "x.png"], "bench --out"),
        (["plot", str(Path(__file__)), "--out", "x.png"], "has no column kernel, case"),
    ):
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 2 and known in done.output
