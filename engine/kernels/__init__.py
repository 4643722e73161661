"""Computes tensor functions, and chooses among their implementations.

The functions do not communicate, and hold no parameters.
"""
