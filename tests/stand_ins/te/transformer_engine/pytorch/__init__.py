"""As in Transformer Engine."""
