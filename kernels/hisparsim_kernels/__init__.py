"""Triton kernels for sparse MLA with hierarchical residency, and their plain references."""
