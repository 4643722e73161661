"""Measurements that a person runs and reads; no part of the engine, and installed with nothing."""
