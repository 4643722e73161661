"""One rank of a training run, assembled from its parts."""
