"""Check that a layout trains the same model as one process, and name the first thing that differs if it does not."""
