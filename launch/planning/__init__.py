"""The planner: legal layouts of a run on a cluster, by predicted step time and memory."""
