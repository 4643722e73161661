"""What a field may hold: numbers, paths, corpora and files as people write them, and a record for each named choice."""
