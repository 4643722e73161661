"""What `benchmarks/gpu.py` runs: shapes, contenders, one process's measurement, rows, tables."""
