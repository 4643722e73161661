"""The sections' fields, with their types, bounds, descriptions and verdicts on a resume."""
