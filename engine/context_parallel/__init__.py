"""Context parallelism: a sample cut over ranks, which gather its keys and values for attention."""
