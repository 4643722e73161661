"""A launcher's or rank's process, from its first second to its exit code."""
