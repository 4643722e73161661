"""Turns commands that read a trained model into jobs, and runs the jobs on ranks."""
