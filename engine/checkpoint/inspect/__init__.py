"""Reads a finished checkpoint's weights, tokenizer and corpora without its run."""
