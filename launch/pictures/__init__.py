"""Draws charts, schedules and layouts as SVG and HTML, for pages and files."""
