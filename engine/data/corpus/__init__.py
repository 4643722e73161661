"""Corpora on disk: tokens, records and tokenizers. `triaxis.launch.prepare` creates them."""
