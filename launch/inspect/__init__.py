"""Checkpoint checks and comparisons, for `triaxis checkpoint`. Training ranks import nothing from here."""
