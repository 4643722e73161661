"""Searches a run's legal layouts on a cluster for those with the least predicted step time and memory."""
