"""What a run does around its steps: keep a directory, validate, collect garbage."""
