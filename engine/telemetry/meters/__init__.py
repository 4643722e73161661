"""Measurements of every step: one file each, and `table.py`, which lists them."""
