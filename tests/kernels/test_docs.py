"""The first call of docs/kernels.md runs as it stands and agrees with the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_the_first_call_of_the_page_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "activate()" in code
    )
    exec(compile(block, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("128 rows attended")
    assert float(printed.split()[-1]) < 1e-2
