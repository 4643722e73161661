"""Corpora on disk: from text to tokens, offline."""
