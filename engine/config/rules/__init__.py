"""Rules that relate fields to each other: three tables, a file for the rules of each section, and the check of all."""
