"""Simulate KV residency policies for sparse-MLA serving."""
