"""Keeps, recomputes or moves to host memory the activations between forward and backward."""
