"""Dense attention in fp64 and the tolerance derived from it, used by tests, `verify`, `doctor` and benchmarks."""
