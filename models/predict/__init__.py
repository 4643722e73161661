"""Predictions from the configuration alone: memory, traffic and recomputation."""
