"""Megatron-Core: its distributed checkpoints, in and out."""
