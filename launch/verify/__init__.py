"""Checks that a layout trains the same model as one process, and names the first difference."""
