"""Tensor parallelism, with sharded parameters, conjugate operator pairs, norms and dropout."""
