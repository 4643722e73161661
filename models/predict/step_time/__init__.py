"""Predicts a training step's seconds on a cluster from counted work and measured device rates."""
