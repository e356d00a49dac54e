"""How long a step takes: the load of a step, the cost interface, and its sources."""
