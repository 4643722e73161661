"""Assemble one rank of a training run."""
