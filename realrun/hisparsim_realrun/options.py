"""How a run is made real: device, selections, exactness. A slice of the model is the scenario's business."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class SelectionMode(Enum):
    """Where selections come from."""

    MODEL = "model"
    """The random model's own index queries and keys."""
    PROFILE = "profile"
    """A seeded process with the scenario's locality profile."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a real run beside the scenario."""

    device: str = "cpu"
    kernels: str | None = None
    """``torch`` or ``triton``; None = the device's default."""
    threads: int | None = None
    """Compute threads on a CPU; None = all cores but one."""
    selection: SelectionMode = SelectionMode.PROFILE
    record_selections: Path | None = None
    """New top-k trace of what decodes select."""
    replay_selections: Path | None = None
    """Top-k trace whose selections decodes repeat, token by token; what it lacks comes from ``selection``."""
    batch_invariant: bool = False
    """Products of fixed shapes: a token's bits do not depend on the batch, the policy or the ranks."""
    keep_hidden: bool = False
    """Keep every token's final hidden state (tests)."""
    inline_copies: bool = False
    """Make page copies at once instead of beside compute."""
