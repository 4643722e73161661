"""Traces a run's steps with the torch profiler and NVTX ranges."""
