"""Telemetry records: step metrics, events, and their files."""
