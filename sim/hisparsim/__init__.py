"""Simulate KV residency policies for sparse-MLA serving.

from hisparsim import Scenario, load_trace, simulate
result = simulate(Scenario.load(), load_trace("openhands"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparsim.des.simulate import simulate
    from hisparsim.results.records import RunResult
    from hisparsim.specs.scenario import Scenario
    from hisparsim_traces import load as load_trace

__all__ = ["RunResult", "Scenario", "is_compiled", "load_trace", "simulate"]
__version__ = "0.1.0"

_HOMES = {
    "simulate": ("hisparsim.des.simulate", "simulate"),
    "RunResult": ("hisparsim.results.records", "RunResult"),
    "Scenario": ("hisparsim.specs.scenario", "Scenario"),
    "load_trace": ("hisparsim_traces", "load"),
}


def is_compiled() -> bool:
    """Query: whether the simulation loop is compiled in this installation (docs/performance.md)."""
    from importlib.util import find_spec

    found = find_spec("hisparsim.serving.core")
    return found is not None and not str(found.origin).endswith(".py")


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import hisparsim`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hisparsim' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
