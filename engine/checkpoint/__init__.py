"""Sharded checkpoints: complete or not there, and loadable in any layout."""
