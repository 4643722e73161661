"""Evaluation and generation with a trained GPT, without its optimizer."""
