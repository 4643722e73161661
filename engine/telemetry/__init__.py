"""Measurements of a run and their outlets: counts and formulas, terminal, JSONL, wandb, TensorBoard."""
