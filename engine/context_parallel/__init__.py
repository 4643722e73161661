"""Context parallelism: each sample is cut over ranks, which gather keys and values or exchange heads for attention."""
