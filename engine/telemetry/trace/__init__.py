"""Traces for other tools: torch's profiler and NVTX."""
