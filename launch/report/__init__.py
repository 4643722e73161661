"""Show a run directory as one HTML page: `record` reads the files, `page` assembles what the other modules render."""
