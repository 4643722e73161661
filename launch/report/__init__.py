"""A run directory as one HTML page: record (what the files say), charts (SVG), page (HTML)."""
