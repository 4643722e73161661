"""A run directory as one HTML page: record (the files' contents), charts (SVG), page (HTML)."""
