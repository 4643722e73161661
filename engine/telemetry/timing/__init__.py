"""Measures where step time goes on each rank, averages it over the ranks, and draws the timeline."""
