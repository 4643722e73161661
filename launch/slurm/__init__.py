"""Run a batch job under SLURM: start its attempts, record how they ended, and requeue it."""
