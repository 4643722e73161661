"""Checks that a layout trains the same model as one process.

The first difference is named.
"""
