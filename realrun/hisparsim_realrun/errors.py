"""What can go wrong in a real run: the user's mistakes, and a run that dies."""

from __future__ import annotations

from typing import Any


class RealRunError(ValueError):
    """A request for a real run that cannot be met; one line says what, the value, the rule and what to do."""


class RunDied(RuntimeError):
    """A run that cannot go on: memory ran out, a rank is gone, a value is not finite.

    ``run`` holds what was measured until then, finished requests included, where a loop had begun.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.run: Any = None


def death_of(error: Exception) -> RunDied | None:
    """Query: the death that an error means, None where it is something else (a fault of the program).

    torch names an exhausted GPU in a class of its own, an exhausted host only in words.
    """
    if isinstance(error, RunDied):
        return error
    first = str(error).partition("\n")[0]
    lowered = first.lower()
    if isinstance(error, MemoryError) or "out of memory" in lowered or "can't allocate memory" in lowered:
        return RunDied(f"memory ran out: {first or type(error).__name__}")
    return None


EXIT_DIED = 3
"""Exit code of the command line for :class:`RunDied`."""
