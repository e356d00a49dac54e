"""Read, describe and synthesise LLM serving traces. Usable on its own: it imports none of the simulator."""

from __future__ import annotations

from .detecting import detect
from .errors import TraceError
from .loading import load
from .replay import prepare, spread_ties
from .synth import Lengths, closed_loop, conversations, poisson
from .trace import LoadReport, Offered, Trace

__all__ = [
    "Lengths",
    "LoadReport",
    "Offered",
    "Trace",
    "TraceError",
    "closed_loop",
    "conversations",
    "detect",
    "load",
    "poisson",
    "prepare",
    "spread_ties",
]
