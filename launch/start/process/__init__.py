"""A process of ours from its first second to its exit code."""
