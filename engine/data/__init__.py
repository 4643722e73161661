"""Data: from tokens on disk to the microbatches of a step. Only `loader` imports torch."""
