"""The clock: SimPy processes that play a trace, and the links with shared bandwidth."""
