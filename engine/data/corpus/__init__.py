"""Corpora on disk: tokens, their records and tokenizers. `triaxis.launch.prepare` makes them."""
