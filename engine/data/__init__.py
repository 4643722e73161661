"""Turns tokens on disk into each step's microbatches. Only `loader`, `documents` and `sequence_part` import torch."""
