"""Provides accumulation dtypes and a counter-based hash to all other packages."""
