"""Counts one rank's messages, memory and operators in any layout.

The engine's own code runs on tensors that hold no memory.
"""
