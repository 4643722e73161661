"""Numbers that every room shares: accumulation dtypes and a counter-based hash."""
