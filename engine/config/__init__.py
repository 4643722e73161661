"""Define the configuration's sections and the rules between them; read and write its YAML files."""
