"""Agreement with vLLM 0.33's scheduler on the logs that stand beside the repository."""

from pathlib import Path

import pytest

from hisparsim.conform.compare import run_conformance
from hisparsim.conform.workload import read_log

SHORT = ("b_c32_8k", "h_c32_8k", "h_c32_60k", "h_c32_80k")
LONG = (
    "b_c256_4k", "b_c32_mix", "b_c64_32k", "b_oh_c8", "h_c256_4k", "h_c32_80k_host16", "h_c64_32k",
    "h_c64_32k_host24", "h_c64_32k_lag8", "h_c64_32k_sync", "h_c8_1M", "h_oh_c8", "h_ohx_c16",
)  # fmt: skip


@pytest.fixture
def logs_dir(reference_dir: Path) -> Path:
    folder = reference_dir / "reference" / "vllm_oracle"
    if not folder.is_dir():
        pytest.skip(f"no decision logs in {folder}")
    return folder


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_every_step_and_column_equals_the_real_schedulers(logs_dir: Path, name: str) -> None:
    log = read_log(logs_dir / f"{name}.json")
    verdict = run_conformance(log)
    assert verdict.first_difference is None
    assert verdict.num_equal_steps == verdict.num_steps == len(log.rows)
    assert all(logged == pytest.approx(own) for logged, own in verdict.totals.values())


@pytest.mark.slow
def test_every_log_there_is_agrees(logs_dir: Path) -> None:
    others = {path.stem for path in logs_dir.glob("*.json")} - {*SHORT, *LONG}
    verdicts = [run_conformance(read_log(logs_dir / f"{name}.json")) for name in sorted(others)]
    assert [verdict.name for verdict in verdicts if not verdict.conforms] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h_c32_8k"])
def test_the_laws_hold_along_a_logged_run(logs_dir: Path, name: str) -> None:
    assert run_conformance(read_log(logs_dir / f"{name}.json"), check=True).conforms
