"""A trained GPT without its optimizer: evaluation and generation."""
