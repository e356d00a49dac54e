"""`python -m hisparsim_traces`: the trace commands without the simulator."""

from __future__ import annotations

from .cli import app

if __name__ == "__main__":
    app(prog_name="hisparsim trace")
