"""Activations between forward and backward: kept, recomputed, or moved to host memory."""
