"""Detect a hang from the ranks' heartbeats, and report which rank causes it."""
