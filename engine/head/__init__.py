"""Computes per-token losses from the head's product, whose vocabulary is cut over tp."""
