"""Proof that a layout trains the same model as one process, or the name of what differs."""
