"""Holds the commands that people type; only this package knows both the engine and the models."""
