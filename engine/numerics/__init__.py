"""Accumulation dtypes and a counter-based hash, which all other packages share."""
