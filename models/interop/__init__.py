"""Exchange with other libraries: mapping their names and conventions to ours."""
