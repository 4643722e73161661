"""The configuration: its sections, the rules between them, and its YAML files."""
