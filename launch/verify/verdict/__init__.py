"""From measured differences to a verdict and its cause."""
