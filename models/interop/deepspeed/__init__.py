"""Read DeepSpeed's configuration files."""
