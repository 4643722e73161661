"""Quantises matrices to FP8 and multiplies them, for linear layers."""
