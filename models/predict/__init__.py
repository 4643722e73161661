"""Predicts memory, traffic and step time from the configuration alone, and chooses what to recompute."""
