"""Reduce gradients in flat buffers, clip them, and update the parameters with a sharded optimizer."""
