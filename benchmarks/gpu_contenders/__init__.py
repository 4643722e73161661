"""Parts of `benchmarks/gpu.py`: shapes, contenders, one process's measurement, rows, tables."""
