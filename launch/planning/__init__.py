"""The planner: a run's legal layouts on a cluster, by predicted step time and memory."""
