"""Step times: marks, their sums over ranks, and the timeline."""
