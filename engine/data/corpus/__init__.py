"""Reads and writes tokens on disk, and opens their records and tokenizers. `triaxis.launch.prepare` creates corpora."""
