"""Manage a launcher's or rank's own process, such as its streams, signals and exit code."""
