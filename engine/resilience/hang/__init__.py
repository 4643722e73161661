"""Hangs: heartbeats of the ranks, the thread that watches them, and its report."""
