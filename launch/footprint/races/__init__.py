"""Find races between streams, on the CPU."""
