"""Flat buffers, gradient reduction, the sharded optimizer, clipping and learning rates."""
