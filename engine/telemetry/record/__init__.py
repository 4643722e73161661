"""Records each step's metrics and a run's events, and writes and reads their files."""
