"""Reads and writes a checkpoint's files: tensors, and a manifest with fingerprints."""
