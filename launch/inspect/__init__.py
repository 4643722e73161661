"""Checkpoints checked and compared, for `triaxis checkpoint`. Nothing here is imported by a training rank."""
