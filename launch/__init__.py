"""The composition root: what people type, and the only package that knows both the engine and the models."""
