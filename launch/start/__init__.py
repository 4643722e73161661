"""The way from a command line to running ranks."""
