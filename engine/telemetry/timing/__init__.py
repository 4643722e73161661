"""Times of a step: marks, their sums over ranks, and the timeline."""
