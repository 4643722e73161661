"""Measures where each rank's step time goes, and draws the ranks' timeline."""
