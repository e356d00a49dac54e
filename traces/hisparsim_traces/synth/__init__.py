"""Making traces: simple shapes by call, realistic ones from a description."""

from __future__ import annotations

from .shapes import Lengths, closed_loop, conversations, poisson

__all__ = ["Lengths", "closed_loop", "conversations", "poisson"]
