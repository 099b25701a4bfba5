"""Dense attention in fp64 and the tolerance derived from it, for tests, `verify`, `doctor` and benchmarks."""
