"""One rank of a training run, put together."""
