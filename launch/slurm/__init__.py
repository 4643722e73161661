"""The batch job under SLURM: its attempts, its history and its report."""
