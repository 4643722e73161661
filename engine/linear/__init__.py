"""Computes column- and row-parallel linear layers, and the vocab-parallel embedding."""
