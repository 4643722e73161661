"""Tensor parallelism: sharded parameters, column- and row-parallel layers, embedding, cross-entropy, dropout."""
