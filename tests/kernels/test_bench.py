"""Benchmarks as far as a CPU goes: the cases, the references, the rows, the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hisparsim_kernels import bench, cli, registry
from hisparsim_kernels.bench_plot import plot
from hisparsim_kernels.errors import BenchFileError, DeviceError
from hisparsim_kernels.registry import BenchCase, BenchRun, Roof
from hisparsim_kernels.roofs import PEAKS, peaks_of, share_of_roof

CPU = torch.device("cpu")


def test_every_kernel_module_has_cases_and_one_small_enough_for_a_cpu() -> None:
    for module in registry.KERNEL_MODULES:
        cases = registry.bench_cases((module,))
        assert cases, module
        assert any(case.tiny for case in cases), module
        names = [(case.kernel, case.case) for case in cases]
        assert len(set(names)) == len(names)


SMALL = [
    case
    for case in registry.bench_cases()
    if case.tiny
    and case.kernel
    in ("write_rows", "read_rows", "write_index_keys", "mirror_rows", "grouped_gemm", "mla_decode")
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.kernel} {case.case}")
def test_the_kernel_of_a_case_runs_on_what_it_prepares_and_counts_its_work(case: BenchCase) -> None:
    prepared = case.prepare(CPU)
    prepared.run()
    assert prepared.moved_bytes > 0
    assert prepared.flops > 0 or case.roof in (Roof.HBM, Roof.PCIE)


def test_the_share_of_the_roof_is_work_over_time_over_peak() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is PEAKS["H200"]
    assert share_of_roof(Roof.HBM, peaks, int(4.8e9), 0, 1e-3) == pytest.approx(1.0)
    assert share_of_roof(Roof.TENSOR_FP8, peaks, 1, int(1979e9), 2e-3) == pytest.approx(0.5)
    assert share_of_roof(Roof.PCIE, peaks, int(32e6), 0, 1e-3) == pytest.approx(0.5)
    assert peaks_of("Some other card") is None and share_of_roof(Roof.HBM, None, 1, 1, 1.0) is None


def test_on_a_cpu_only_tiny_cases_run_and_rows_survive_the_file(tmp_path: Path) -> None:
    calls: list[str] = []

    def case(name: str, tiny: bool) -> BenchCase:
        prepared = BenchRun(
            run=lambda: calls.append("kernel"),
            reference=lambda: calls.append(name),
            moved_bytes=100,
            flops=10,
        )
        return BenchCase("k", name, Roof.HBM, lambda device: prepared, tiny=tiny)

    rows = bench.run([case("small", True), case("large", False)], "cpu")
    assert set(calls) == {"small"} and [row.implementation for row in rows] == ["reference"]
    bench.write_csv(rows, tmp_path / "rows.csv")
    assert bench.read_csv(tmp_path / "rows.csv") == rows
    figure = tmp_path / "rows.png"
    done = CliRunner().invoke(cli.app, ["plot", str(tmp_path / "rows.csv"), "--out", str(figure)])
    assert done.exit_code == 0 and figure.stat().st_size > 1000


def test_a_figure_of_nothing_or_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchFileError, match="no rows to draw"):
        plot([], tmp_path / "rows.png")
    with pytest.raises(BenchFileError, match=r"'\.gif'; a figure ends in \.png, \.svg, \.pdf"):
        plot([], tmp_path / "rows.gif")


def test_the_command_prints_rows_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    done = CliRunner().invoke(
        cli.app, ["bench", "--device", "cpu", "--modules", "rows", "--json", "--out", str(out)]
    )
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == {"write_rows", "read_rows"} and out.is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_asking_for_a_gpu_that_is_absent_is_refused() -> None:
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        bench.run([], "cuda")
    assert CliRunner().invoke(cli.app, ["check"]).exit_code == 2
