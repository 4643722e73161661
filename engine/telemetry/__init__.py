"""Measures a run's steps and writes the numbers to the terminal, files, wandb and TensorBoard."""
