"""Records of the telemetry: metrics of a step, events, and their files."""
