"""Short training runs of a config in several layouts."""
