"""Accumulation dtypes and a counter-based hash, shared by every room."""
