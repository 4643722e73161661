"""Checks and compares checkpoints for `triaxis checkpoint`. Training ranks import nothing from here."""
