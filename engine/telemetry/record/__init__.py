"""What telemetry records of a run: metrics of each step and events, with the files that hold them."""
