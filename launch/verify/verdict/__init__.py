"""Decide whether a run equals its reference, and find the likely cause if not, from the differences between their tensors."""
