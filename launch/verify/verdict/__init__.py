"""Decides whether a run equals its reference, and names the likely cause if not."""
