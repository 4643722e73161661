"""Shows a run directory as one HTML page. `record` reads the files, and `page` assembles the sections."""
