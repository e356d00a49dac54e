"""The interface that a user's policy fills in."""

from __future__ import annotations

from pathlib import Path

import hisparsim
from hisparsim.serving.policy import REQUIRED


def test_the_required_methods_are_the_abstract_ones() -> None:
    text = (Path(hisparsim.__file__).parent / "serving" / "policy.py").read_text("utf-8")
    marked = text.split("@abstractmethod\n    def ")[1:]
    assert sorted(part.split("(")[0] for part in marked) == list(REQUIRED)
