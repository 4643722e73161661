"""Manage a launcher's or rank's own process: its streams, signals, error messages and exit code."""
