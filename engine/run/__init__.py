"""Keeps a run's directory, validates, and collects garbage between steps."""
