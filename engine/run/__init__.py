"""One run: its directory, its validations, and its garbage collection."""
