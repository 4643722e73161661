"""Assemble one rank of a training run: process group, run directory, data, watchers and error messages."""
