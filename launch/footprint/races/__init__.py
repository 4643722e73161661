"""Races between streams, found on the CPU."""
