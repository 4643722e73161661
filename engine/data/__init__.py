"""Data: from tokens on disk to a step's microbatches. Only `loader`, `documents` and `sequence_part` import torch."""
