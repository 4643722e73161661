"""Triaxis: 3D-parallel pretraining of GPT models."""
