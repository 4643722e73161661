"""Starts a batch job's attempts under SLURM, records how they ended, and requeues the job."""
