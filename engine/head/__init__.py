"""Computes per-token losses from the output head's logits, whose vocabulary is cut over tp."""
