"""The losses of tokens from the head's product, whose vocabulary is cut over tp."""
