"""Builds pipeline schedules as data (plain Python), and executes them (torch)."""
