"""Start a run from the typed command line."""
