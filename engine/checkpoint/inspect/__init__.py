"""Tools that read finished checkpoints."""
