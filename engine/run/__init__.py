"""Keeps a run's directory, computes validation losses, and collects garbage between steps."""
