"""What a run says about itself: counts and formulas, the run directory, the terminal, JSONL, wandb, TensorBoard."""
