"""The command line `ringflash`: `doctor`, `plan`, `verify`, `bench` and `recipes`, which no other package imports.

`console` and `overlays` also serve the recipes and benchmarks.
"""
