"""Seconds that a training step takes on a given cluster, from counted facts and measured rates."""
