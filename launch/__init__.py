"""The composition root: the commands that people type, and the only package that knows both the engine and the models."""
