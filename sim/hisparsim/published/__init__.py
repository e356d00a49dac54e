"""Published end-to-end results, and what the simulator says of the same runs."""
