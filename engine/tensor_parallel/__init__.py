"""Tensor parallelism: sharded parameters and their first values, the conjugate pairs, norms, dropout."""
