"""Hangs: the ranks' heartbeats, the thread that watches them, and its report."""
