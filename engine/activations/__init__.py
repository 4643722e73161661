"""Decides what happens to activations between forward and backward: kept, recomputed, or moved to host memory."""
