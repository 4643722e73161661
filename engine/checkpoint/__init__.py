"""Saves and loads sharded checkpoints, each complete or absent, and loadable in any layout."""
