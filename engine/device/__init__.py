"""Finds a node's GPUs and their driver, and provides pinned host memory and small copies."""
