"""Exchange with other libraries: their names and conventions, and ours."""
