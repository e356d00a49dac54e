"""What can go wrong in a real run: the user's mistakes, and a run that dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import RealRun


class RealRunError(ValueError):
    """A request for a real run that cannot be met; one line says what, the value, the rule and what to do."""


class RunDied(RuntimeError):
    """A run that cannot go on: memory ran out, a rank is gone, a value is not finite.

    ``run`` holds what was measured until then, finished requests included, where a loop had begun.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.run: RealRun | None = None


EXIT_DIED = 3
"""Exit code of the command line for :class:`RunDied`."""
