"""Seconds of a training step on a given cluster, from counted facts and measured rates."""
