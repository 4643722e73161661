"""Run commands that read a trained model: turn the command line into a job, and run the job on ranks."""
