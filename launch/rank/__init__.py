"""Connect, build and watch one rank of a training run, and explain its failures."""
