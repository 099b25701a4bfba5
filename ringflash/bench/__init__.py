"""ringflash bench: the benchmarks of the repository in one command, beside a saved baseline.

run (a script of benchmarks/, in processes of its own)  ->  results (JSON)  ->  compare, show, plot
"""
