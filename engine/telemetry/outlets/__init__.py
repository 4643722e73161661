"""Writes a run's records and messages to the terminal, logs, wandb and TensorBoard."""
