"""Numbers that follow from a whole configuration."""
