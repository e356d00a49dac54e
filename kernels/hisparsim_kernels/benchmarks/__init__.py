"""Benchmark cases of kernel modules, one file a module: sizes, inputs, and how many bytes and operations
count.
"""
