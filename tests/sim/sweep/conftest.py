"""Small traces and sweep files that run in a fraction of a second."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_sweeps import SWEEP, small_trace

from hisparsim_traces.formats.own_parquet import write


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.parquet"
    write(small_trace(), path)
    return path


@pytest.fixture
def sweep_file(tmp_path: Path, trace_file: Path) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_text(f'trace = "{trace_file}"\n{SWEEP}', encoding="utf-8")
    return path
