"""Sweeps: many scenarios over the same traces, searched, bounded, ending in a recommendation."""
