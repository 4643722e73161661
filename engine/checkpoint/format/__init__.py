"""Reads and writes a checkpoint's tensors and manifest."""
