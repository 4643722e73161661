"""Measures a run's steps and writes the numbers to the terminal, JSON lines files, wandb and TensorBoard."""
