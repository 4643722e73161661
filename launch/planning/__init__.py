"""Searches for a run's layouts with the least predicted step time and memory."""
