"""Detects and handles faults during training.

The faults are hangs, numbers that are not finite, and replicas that differ.
"""
