"""Plain float64 torch references of the kernels, used by tests and benchmarks. Slow and obvious on
purpose."""
