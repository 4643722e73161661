"""Pictures as SVG and HTML, for pages and files: charts, schedules, layouts."""
