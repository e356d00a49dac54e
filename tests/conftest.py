"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

from hisparsim import is_compiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_compiled():
        sealed = pytest.mark.skip(reason="the simulation loop is compiled here, its classes are sealed")
        for item in items:
            if "interpreted" in item.keywords:
                item.add_marker(sealed)


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """The folder with ``reference/`` and ``traces/``: measured data that is not part of the repository."""
    folder = Path(os.environ.get("HISPARSIM_REFERENCE", Path(__file__).parents[2] / "shared"))
    if not (folder / "reference").is_dir():
        pytest.skip(f"no reference data in {folder} (set HISPARSIM_REFERENCE)")
    return folder
