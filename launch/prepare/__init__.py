"""Corpora made of text, joined, cut and checked, offline. Nothing here is imported by a training rank."""
