"""Check and compare checkpoints, for `triaxis checkpoint`. Training ranks import nothing from here."""
