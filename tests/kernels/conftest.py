"""Kernel tests run in Triton's interpreter, which has to be chosen before triton is imported: `pytest
tests/kernels`.

Collected together with other folders they skip with that reason, since the switch would leak into those
tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the calls that several tests share
REASON = "kernel tests need TRITON_INTERPRET=1 from the start: run `pytest tests/kernels` on its own"


def _only_kernel_tests(config: pytest.Config) -> bool:
    paths = [(config.invocation_params.dir / str(arg).split("::")[0]).resolve() for arg in config.args]
    return bool(paths) and all(path == HERE or HERE in path.parents for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if (
        os.environ.get("TRITON_INTERPRET") != "1"
        and _only_kernel_tests(config)
        and "triton" not in sys.modules
    ):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from hisparsim_kernels.interpreter import is_interpreting

    if not is_interpreting():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True, scope="session")
def corrected_interpreter() -> None:
    """Correct the interpreter once a process; its self-test fails loudly on another triton."""
    from hisparsim_kernels.interpreter import activate, is_interpreting

    if is_interpreting():
        activate()
