"""Offline tools that prepare, merge, split and check corpora. Training ranks import nothing from here."""
