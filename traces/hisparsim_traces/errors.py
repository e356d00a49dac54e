"""The one exception this package raises for input it cannot honestly use."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace, or a request made of one, breaks a rule. One line: where, what, the rule, what to do.

    Attributes:
        path: the file, or None where no file is involved.
        line: 1-based line (or record) number, or None where the whole file is meant.
    """

    def __init__(self, message: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        self.path = None if path is None else str(path)
        self.line = line
        where = "" if self.path is None else f"{self.path}: " if line is None else f"{self.path}:{line}: "
        super().__init__(where + " ".join(message.split()))
