"""Detect and handle faults during training: hangs, numbers that are not finite, replicas that differ."""
