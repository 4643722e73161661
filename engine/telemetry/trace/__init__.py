"""Traces of a run's steps: a torch profiler file, and NVTX ranges that Nsight Systems shows."""
