"""Outlets of the telemetry: terminal, logs, wandb and TensorBoard."""
