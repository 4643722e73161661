"""Proof that a layout trains the same model, or what differs between one process and many ranks, by name."""
