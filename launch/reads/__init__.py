"""Reconstructs which documents and tokens a run has read, from its configuration and its records.

Training ranks import nothing from here.
"""
